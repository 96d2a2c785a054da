"""Attention over a paged cache in C++ for models whose other layers run in torch: one call for each layer.

Knows batches and the cache, no model. The invariant: a row's result is the same bits whatever stands beside it, however
its prompt was cut, on any number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from workers.generation.engine.batch import StepBatch
from workers.generation.engine.kernels import Library
from workers.generation.engine.native_batch import BatchStruct, PackedBatch, pack_batch, raise_error, with_cache
from workers.generation.engine.native_model import LayerStruct, ModelStruct
from workers.generation.engine.paged_cache import CacheShape, PagedCache

OPENMP = ("libgomp", "libomp", "libiomp5")  # each has GOMP_parallel, which code of GCC calls
MULTIPLE = 8  # of positions of a block and of numbers of a head: the width of a vector

_Count = ctypes.c_int64
_Pointer = ctypes.c_void_p


class LayerCall(ctypes.Structure):
    """`LayerCall` of attention_call.cpp."""

    _fields_ = (
        *((name, _Pointer) for name in ("queries", "keys", "values", "out")),
        *((name, _Count) for name in ("query_stride", "key_stride", "value_stride", "out_stride")),
        ("scale", ctypes.c_double),
    )


def can_attend(shape: CacheShape, device: torch.device) -> bool:
    """Say whether the kernels know such a cache."""
    return device.type == "cpu" and shape.block_size % MULTIPLE == 0 and shape.head_dim % MULTIPLE == 0


class NativeAttention:
    """The attention of all layers of a model over `cache`. `close` gives threads and memory back."""

    def __init__(
        self,
        library: Library,
        cache: PagedCache,
        *,
        group_size: int,
        windows: Sequence[int | None],
        num_threads: int,
    ) -> None:
        """Allocate what the threads need. `windows` is one for each layer; ask `can_attend` first."""
        shape = cache.shape
        layers = (LayerStruct * shape.num_layers)(*(LayerStruct(window=window or 0) for window in windows))
        struct = ModelStruct(
            num_layers=shape.num_layers,
            num_heads=group_size * shape.num_kv_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            layers=layers,
        )
        create = library.function("gea_attention_create", _Pointer, [ctypes.POINTER(ModelStruct), _Pointer, _Count])
        self._begin = library.function("gea_attention_begin", ctypes.c_int, [_Pointer, ctypes.POINTER(BatchStruct)])
        self._run = library.function("gea_attention_run", None, [_Pointer, _Count, ctypes.POINTER(LayerCall)])
        self._destroy = library.function("gea_attention_destroy", None, [_Pointer])
        self._batch: PackedBatch | None = None
        self._cache = cache  # whose memory the handle points to
        self._handle = create(ctypes.byref(with_cache(struct, cache)), find_parallel(), num_threads)
        if not self._handle:
            raise MemoryError(f"no memory or no threads for attention on {num_threads} threads")

    def begin(self, batch: StepBatch) -> None:
        """Take the rows of a step. Raises ValueError for a batch that does not fit the cache."""
        packed = pack_batch(batch)
        raise_error(self._begin(self._handle, ctypes.byref(packed.struct)), batch)
        self._batch = packed

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Write keys and values `(T, num_kv_heads, head_dim)`, then attend from `query` `(T, num_heads, head_dim)`.

        Returns the shape and dtype of `query`. T are the rows of the batch that has begun.
        """
        rows = _rows(query), _rows(key), _rows(value)
        mixed = torch.empty(query.shape)  # (T, num_heads, head_dim)
        call = LayerCall(
            *(part.data_ptr() for part in (*rows, mixed)), *(part.stride(0) for part in (*rows, mixed)), scale
        )
        self._run(self._handle, layer, ctypes.byref(call))
        return mixed.to(query.dtype)

    def close(self) -> None:
        """Give threads and memory back. Idempotent."""
        handle, self._handle = self._handle, None
        if handle:
            self._destroy(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """Return `(T, heads, head_dim)` in fp32, the heads of a row side by side."""
    wide = heads.float()
    is_dense = wide.stride(2) == 1 and wide.stride(1) == wide.shape[2]
    return wide if is_dense else wide.contiguous()


@functools.cache
def find_parallel() -> int | None:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch has loaded, None where there is none.

    Its threads wait for torch's next work by spinning: others beside them would get half a core.
    """
    for path in _loaded(OPENMP):
        loaded = ctypes.CDLL(path)
        if hasattr(loaded, "GOMP_parallel"):
            return ctypes.cast(loaded.GOMP_parallel, _Pointer).value
    return None


def _loaded(names: tuple[str, ...]) -> list[str]:
    """Return the paths of the loaded libraries whose name begins with one of `names`."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    paths = {line[line.index("/") :] for line in lines if "/" in line}
    return sorted(path for path in paths if Path(path).name.startswith(names))
