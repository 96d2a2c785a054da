"""The weights of a model as the C++ kernels read them: packed into panels, layer by layer, in one piece of memory.

Knows tensors and the structures of `kernels/source/model.h`, no cache and no batches. The invariant: what is packed is
the tensor of the source in the wanted number format, 8 bits as `quantize_int8` has them.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import torch

from schemas.errors import ConfigError
from workers.generation.engine.config import ModelConfig
from workers.generation.engine.kernels.library import Library
from workers.generation.engine.protocol import Precision
from workers.generation.engine.rope import rope_table
from workers.generation.engine.weight_source import LayerWeights, Rows, WeightSource

FORMATS = {Precision.FP32: 0, Precision.BF16: 1, Precision.FP16: 2, Precision.INT8: 3}
# What is packed; 8 bits are made of fp32 on the way.
DTYPES = {
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
    Precision.FP16: torch.float16,
    Precision.INT8: torch.float32,
}
PANEL = 16  # outputs that lie side by side
CACHE_LINE = 64
SLICE_OUTPUTS = 4_096  # packed at once, so that a large vocabulary needs little memory besides

_Pointer = ctypes.c_void_p
_Number = ctypes.c_int64


class LayerStruct(ctypes.Structure):
    """`Layer` of model.h."""

    _fields_ = (
        *((name, _Pointer) for name in ("qkv", "out", "gate_up", "down", "attention_norm", "mlp_norm")),
        *((name, _Pointer) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias")),
        *((name, _Pointer) for name in ("query_norm", "key_norm")),
        ("window", _Number),
    )


class ModelStruct(ctypes.Structure):
    """`Model` of model.h."""

    _fields_ = (
        *((name, _Number) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers")),
        *((name, _Number) for name in ("num_heads", "num_kv_heads", "head_dim", "max_context")),
        *((name, _Number) for name in ("weight_format", "kv_format", "num_blocks", "block_size")),
        ("norm_eps", ctypes.c_double),
        *((name, _Pointer) for name in ("embedding", "head", "final_norm", "cos", "sin")),
        ("layers", ctypes.POINTER(LayerStruct)),
        *((name, _Pointer) for name in ("keys", "values", "key_scales", "value_scales")),
    )


class NativeModel:
    """Packed weights. `struct` describes all but the cache; what it points to lives as long as this object."""

    def __init__(self, library: Library, source: WeightSource, *, precision: Precision, max_context: int) -> None:
        """Read and pack the weights. Raises ConfigError for a model or precision that the kernels cannot run."""
        config = source.config
        _refuse_unknown(config, precision)
        self.library = library
        self.config = config
        self.precision = precision
        self._panel_bytes = library.function("gea_panel_bytes", _Number, [_Number, _Number])
        self._pack = library.function("gea_pack", None, [_Pointer, _Number, _Number, _Pointer, _Number, _Number])
        self._kept: list[torch.Tensor] = []
        self._arena = _Arena(sum(self._matrix_bytes(*shape) for shape in _shapes(config)))
        self._layers = (LayerStruct * config.num_layers)()
        self.struct = self._pack_model(source, max_context)

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of the packed weights."""
        return self._arena.size + sum(tensor.nbytes for tensor in self._kept)

    def _pack_model(self, source: WeightSource, max_context: int) -> ModelStruct:
        config = self.config
        for number in range(config.num_layers):
            self._layers[number] = self._pack_layer(source.layer(number), config.windows[number])
        head = source.head()
        embedding = self._matrix(source.embedding())
        cos, sin = rope_table(config, max_context)  # (max_context, head_dim // 2) each
        return ModelStruct(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_context=max_context,
            weight_format=FORMATS[self.precision],
            norm_eps=config.norm_eps,
            embedding=embedding,
            head=embedding if head is None else self._matrix(head),
            final_norm=self._vector(source.final_norm()),
            cos=self._vector(cos),
            sin=self._vector(sin),
            layers=self._layers,
        )

    def _pack_layer(self, layer: LayerWeights, window: int | None) -> LayerStruct:
        gate, up = layer.gate_up.chunk(2)  # (intermediate, hidden) each
        vectors = ("attention_norm", "mlp_norm", "qkv_bias", "out_bias", "gate_up_bias", "down_bias")
        return LayerStruct(
            qkv=self._matrix(layer.qkv),
            out=self._matrix(layer.out),
            gate_up=self._matrix(gate, up),
            down=self._matrix(layer.down),
            window=window or 0,
            **{name: self._vector(getattr(layer, name)) for name in (*vectors, "query_norm", "key_norm")},
        )

    def _matrix(self, *parts: Rows) -> int:
        """Pack matrices of one shape `(outputs, inputs)`, their panels in turn, and return the address."""
        outputs, inputs = parts[0].shape
        address = self._arena.take(self._matrix_bytes(len(parts), outputs, inputs))
        bytes_each = self._panel_bytes(FORMATS[self.precision], inputs)
        for number, part in enumerate(parts):
            for start in range(0, outputs, SLICE_OUTPUTS):
                first = address + (start // PANEL * len(parts) + number) * bytes_each
                self._pack_slice(first, len(parts), part[start : start + SLICE_OUTPUTS])
        return address

    def _pack_slice(self, address: int, step: int, weight: torch.Tensor) -> None:
        weight = weight.to(DTYPES[self.precision]).contiguous()  # (outputs, inputs)
        self._pack(address, step, FORMATS[self.precision], weight.data_ptr(), *weight.shape)

    def _vector(self, numbers: torch.Tensor | None) -> int | None:
        if numbers is None:
            return None
        self._kept.append(numbers.float().contiguous())
        return self._kept[-1].data_ptr()

    def _matrix_bytes(self, num_parts: int, outputs: int, inputs: int) -> int:
        size = num_parts * -(-outputs // PANEL) * int(self._panel_bytes(FORMATS[self.precision], inputs))
        return -(-size // CACHE_LINE) * CACHE_LINE


class _Arena:
    """One piece of memory for all weights, in huge pages where the kernel gives them."""

    def __init__(self, size: int) -> None:
        self.size = size
        try:
            self._memory = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {size} bytes of weights") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._used = 0

    def take(self, size: int) -> int:
        """Return the address of the next `size` bytes."""
        address = self._start + self._used
        self._used += size
        assert self._used <= self.size
        return address


def _shapes(config: ModelConfig) -> Iterator[tuple[int, int, int]]:
    """Yield number, outputs and inputs of all matrices."""
    mixed = config.num_heads * config.head_dim
    yield (1 if config.is_tied else 2), config.vocab_size, config.hidden_size
    for _ in range(config.num_layers):
        yield 1, mixed + 2 * config.num_kv_heads * config.head_dim, config.hidden_size
        yield 1, config.hidden_size, mixed
        yield 2, config.intermediate_size, config.hidden_size
        yield 1, config.hidden_size, config.intermediate_size


def _refuse_unknown(config: ModelConfig, precision: Precision) -> None:
    if precision not in FORMATS:
        raise ConfigError(f"generation.precision: {precision} does not run on the CPU")
    if config.head_dim % 8:
        raise ConfigError(f"generation.model: the kernels need a head_dim of a multiple of 8, not {config.head_dim}")
