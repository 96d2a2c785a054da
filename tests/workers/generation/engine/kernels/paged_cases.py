"""Inputs of decode attention in every shape, a naive loop to compare with, and a child process that interprets.

Triton reads TRITON_INTERPRET once, when it is imported, so that what is interpreted runs in a process of its own:
`python -m tests.workers.generation.engine.kernels.paged_cases out.pt` writes the kernel's results of all cases.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch

from tests.workers.generation.engine.cuda_model import PROMPTS, answers, on_cpu, run_and_keep
from workers.generation.engine.cuda_attention import try_paged_attention
from workers.generation.engine.paged_cache import CacheShape, quantize_kv
from workers.generation.engine.protocol import KVPrecision

LENGTHS = (1, 17, 64, 257, 0)
LONG_LENGTHS = (1, 2, 15, 16, 255, 256, 257, 511, 512, 513, 1_023, 1_024, 1_025)
LONE_ROWS, SPLIT = (1, 3), 256
FEW: dict[str, Any] = {"prompts": PROMPTS[1:4:2], "num_tokens": 5}  # an interpreter takes seconds for each step
NUM_BLOCKS = 80


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None
    dtype: torch.dtype
    is_8_bit: bool = False

    def __str__(self) -> str:
        number = "int8" if self.is_8_bit else str(self.dtype).removeprefix("torch.")
        heads = f"{self.num_heads}x{self.num_kv_heads}x{self.head_dim}"
        return f"{heads}-block{self.block_size}-window{self.window}-{number}"


MHA, GQA, MQA = (2, 2, 16), (6, 2, 24), (4, 1, 64)
CASES = [
    *(Case(*heads, 16, None, torch.float32) for heads in (MHA, GQA, MQA)),
    *(Case(*heads, size, None, torch.float32) for heads, size in ((MHA, 32), (GQA, 64))),
    *(Case(*MHA, 16, window, torch.float32) for window in (1, 33, 250)),
    *(Case(*GQA, 32, 20, dtype) for dtype in (torch.float16, torch.bfloat16)),
    *(Case(*heads, 16, 50, torch.float32, True) for heads in (GQA, MQA)),
    Case(4, 1, 128, 64, None, torch.float16, True),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The tensors of one case, as `paged_attention` takes them. Blocks of a row lie scattered and hold other rows'."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def to(self, device: str) -> Inputs:
        """Return the same on a device."""
        return Inputs(
            query=self.query.to(device),
            keys=self.keys.to(device),
            values=self.values.to(device),
            tables=self.tables.to(device),
            lengths=self.lengths.to(device),
            key_scales=None if self.key_scales is None else self.key_scales.to(device),
            value_scales=None if self.value_scales is None else self.value_scales.to(device),
        )


def inputs(case: Case, *, lengths: tuple[int, ...] = LENGTHS) -> Inputs:
    """Return random tensors for a case, equal in every process."""
    generator = torch.Generator().manual_seed(CASES.index(case) if case in CASES else 0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    lead = (NUM_BLOCKS, case.num_kv_heads)
    keys, values = random(*lead, case.head_dim, case.block_size), random(*lead, case.block_size, case.head_dim)
    per_row = -(-max(lengths) // case.block_size)
    picks = [torch.randperm(NUM_BLOCKS, generator=generator)[:per_row] for _ in lengths]
    shared = {
        "query": random(len(lengths), case.num_heads, case.head_dim),
        "tables": torch.stack(picks).to(torch.int32),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }
    if not case.is_8_bit:
        return Inputs(keys=keys, values=values, **shared)
    key_numbers, key_scales = quantize_kv(keys.transpose(2, 3))
    value_numbers, value_scales = quantize_kv(values)
    turned = key_numbers.transpose(2, 3).contiguous()
    return Inputs(keys=turned, values=value_numbers, key_scales=key_scales, value_scales=value_scales, **shared)


def naive_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    **_: int,
) -> torch.Tensor:
    """Do what `paged_attention` does, one row and head after another: softmax over the positions in sight."""
    wide_keys = keys.float() if key_scales is None else keys.float() * key_scales[:, :, None]
    wide_values = values.float() if value_scales is None else values.float() * value_scales[..., None]
    num_kv_heads, size = keys.shape[1], keys.shape[3]
    result = torch.zeros(query.shape)
    for row, head in itertools.product(range(len(query)), range(query.shape[1])):
        length, kv_head = int(lengths[row]), head // (query.shape[1] // num_kv_heads)
        sight = range(max(0, length - (window or length)), length)
        places = [(int(tables[row, at // size]), at % size) for at in sight]
        if places:
            seen = torch.stack([wide_keys[block, kv_head, :, slot] for block, slot in places])  # (sight, head_dim)
            weights = (seen @ query[row, head].float() * scale).softmax(0)
            result[row, head] = weights @ torch.stack([wide_values[block, kv_head, slot] for block, slot in places])
    return result.to(query.dtype)


def naive(case: Case, given: Inputs) -> torch.Tensor:
    """Return `(N, num_heads, head_dim)` fp32 of the naive loop for a case."""
    return naive_attention(
        given.query.float(),
        given.keys,
        given.values,
        given.tables,
        given.lengths,
        scale=case.head_dim**-0.5,
        window=case.window,
        key_scales=given.key_scales,
        value_scales=given.value_scales,
    )


def run(case: Case, given: Inputs, *, max_length: int = max(LENGTHS)) -> torch.Tensor:
    """Return what the kernel makes of a case, on the device of the tensors."""
    from workers.generation.engine.kernels.paged_attention import paged_attention  # imports Triton

    return paged_attention(
        given.query,
        given.keys,
        given.values,
        given.tables,
        given.lengths,
        max_length=max_length,
        scale=case.head_dim**-0.5,
        window=case.window,
        split=SPLIT,
        key_scales=given.key_scales,
        value_scales=given.value_scales,
    )


def alone(case: Case, row: int) -> tuple[Inputs, int]:
    """Return one row of a case without its neighbours, and its length."""
    given = inputs(case)
    one = slice(row, row + 1)
    picked = {"query": given.query[one], "tables": given.tables[one], "lengths": given.lengths[one]}
    rest = {name: getattr(given, name) for name in ("keys", "values", "key_scales", "value_scales")}
    return Inputs(**picked, **rest), LENGTHS[row]


def trial_faults() -> dict[str, str]:
    """Return what the trial before a model is loaded finds wrong, by the cache's number format."""
    from workers.generation.engine.kernels.paged_attention import paged_attention

    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 24, "num_blocks": 2, "block_size": 16}
    shapes = [
        CacheShape(precision=precision, **sizes) for precision in KVPrecision if precision is not KVPrecision.AUTO
    ]
    return {
        str(shape.precision): try_paged_attention(paged_attention, shape, 3, torch.float32, SPLIT, torch.device("cpu"))
        for shape in shapes
    }


def greedy_answers() -> list[tuple[int, ...]]:
    """Return what a tiny model answers over the kernel, with prompts, decodes and drafts in one step."""
    from workers.generation.engine.kernels.paged_attention import paged_attention

    return answers(on_cpu(paged_attention, run_and_keep, max_rows=4), is_drafted=True, **FEW)


def main(path: str) -> None:
    """Write the results of all cases, of two rows of one without their neighbours, of the trials and of a model."""
    torch.set_num_threads(1)
    results = {str(case): run(case, inputs(case)) for case in CASES}
    for row in LONE_ROWS:
        given, length = alone(CASES[1], row)
        results[f"alone-{row}"] = run(CASES[1], given, max_length=length)
    torch.save((results, trial_faults(), greedy_answers()), path)


if __name__ == "__main__":
    main(sys.argv[1])
