"""Matrix products in 8 bits on CUDA's tensor cores: int8 times int8, and fp8 times fp8.

Knows one matrix at a time, no layers. Weights have one scale for each output, activations one for each row, so that a
neighbour never changes a row. The invariant of int8: sums are whole numbers, hence a row's result is the same bits in
any batch.

Activations of int8 are 15-bit numbers, multiplied as two 7-bit halves stacked on top of each other: one product of
twice as many rows. A decode step is bound by reading the weights, which are read once either way.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

STEPS = 127  # of a weight and of half an activation
HALF = 128  # what the upper half counts
ACTIVATION_STEPS = HALF * STEPS - 1  # upper half at most 127 after rounding, lower at most 64
FP8_MAX = 448.0  # largest number of e4m3
INT8_WIDTH = 16  # all sides are padded to multiples: cuBLASLt refuses others than those of 8, 16 are aligned
FP8_WIDTH = 16
INT8_ROWS = 32  # torch._int_mm on CUDA refuses 16 rows and fewer


class Int8Linear:
    """A matrix in 8 bits for 15-bit activations. Runs on the CPU too, slowly, with the same bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Quantize `weight` `(outputs, inputs)` on its device; `bias` `(outputs,)` is added as it is."""
        self._outputs, self._inputs = weight.shape
        values, self._scales = quantize_rows(_padded(weight.float(), INT8_WIDTH), STEPS)
        self._values = values.to(torch.int8)  # (outputs, inputs), both padded
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `(N, outputs)` for `rows` `(N, inputs)`, in their number format."""
        count = len(rows)
        wide = F.pad(rows.float(), (0, self._values.shape[1] - self._inputs))
        numbers, scales = quantize_rows(wide, ACTIVATION_STEPS)  # (N, inputs), (N,)
        upper = (numbers / HALF).round()
        lower = numbers - upper * HALF
        halves = torch.cat((upper, lower)).to(torch.int8)  # (2 N, inputs)
        sums = torch._int_mm(F.pad(halves, (0, 0, 0, _missing_rows(2 * count))), self._values.t())
        total = (
            sums[:count].float() * HALF + sums[count : 2 * count].float()
        )  # (N, outputs); in int32 it would overflow
        result = (total * scales[:, None] * self._scales)[:, : self._outputs].to(rows.dtype)
        return result if self._bias is None else result + self._bias

    @property
    def num_bytes(self) -> int:
        """Return the memory of the matrix with its scales."""
        return self._values.nbytes + self._scales.nbytes


class Fp8Linear:
    """A matrix in e4m3 for e4m3 activations. Sums are fp32 in an order that the device chooses.

    A CUDA device needs compute capability 8.9; `cuda_device.check_precision` refuses others by name.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Quantize `weight` `(outputs, inputs)` on its device; `bias` `(outputs,)` is added as it is."""
        self._outputs, self._inputs = weight.shape
        self._values, self._scales = quantize_fp8(_padded(weight.float(), FP8_WIDTH))  # (outputs, inputs) padded
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `(N, outputs)` for `rows` `(N, inputs)`, in their number format."""
        wide = F.pad(rows.float(), (0, self._values.shape[1] - self._inputs))
        numbers, scales = quantize_fp8(wide)
        product = torch._scaled_mm(
            numbers,
            self._values.t(),
            scale_a=scales[:, None],
            scale_b=self._scales[None, :],
            out_dtype=torch.bfloat16,  # the only one with a scale for each row
        )
        result = product[:, : self._outputs].to(rows.dtype)
        return result if self._bias is None else result + self._bias

    @property
    def num_bytes(self) -> int:
        """Return the memory of the matrix with its scales."""
        return self._values.nbytes + self._scales.nbytes


def quantize_rows(numbers: torch.Tensor, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whole numbers `(N, inputs)` fp32 within ± steps and fp32 scales `(N,)`. Rows of zeros have scale 1."""
    largest = numbers.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / steps, torch.ones_like(largest))
    return (numbers / scales[:, None]).round().clamp(-steps, steps), scales


def quantize_fp8(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 numbers `(N, inputs)` and fp32 scales `(N,)`. Rows of zeros have scale 1."""
    largest = numbers.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    scaled = (numbers / scales[:, None]).clamp(-FP8_MAX, FP8_MAX)  # beyond, a conversion gives NaN
    return scaled.to(torch.float8_e4m3fn), scales


def _padded(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Return a matrix whose sides are multiples of `width`; what is added is zero."""
    outputs, inputs = weight.shape
    return F.pad(weight, (0, -inputs % width, 0, -outputs % width))


def _missing_rows(count: int) -> int:
    """Return how many rows make a batch one that tensor cores take: a multiple of 16, and enough."""
    return max(INT8_ROWS, count + -count % INT8_WIDTH) - count
