"""A step's batch and a cache as the kernels in C++ see them: the structures of `kernels/source/model.h`.

Knows addresses, not what is computed. The invariant: the arrays of a batch live as long as its `PackedBatch`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from workers.generation.engine.batch import StepBatch
from workers.generation.engine.native_model import ModelStruct
from workers.generation.engine.paged_cache import PagedCache
from workers.generation.engine.protocol import KVPrecision

KV_FORMATS = {KVPrecision.FP32: 0, KVPrecision.BF16: 1, KVPrecision.FP16: 2, KVPrecision.INT8: 3}
OUT_OF_MEMORY = 1
ERRORS = {
    2: "a token id is outside the vocabulary",
    3: "a position is outside the context",
    4: "a block is outside the cache, or a block table too short",
    5: "the numbers of tokens and logits contradict each other",
}

_Numbers = ctypes.c_void_p  # of int32
_Count = ctypes.c_int64


class BatchStruct(ctypes.Structure):
    """`Batch` of model.h."""

    _fields_ = (
        *((name, _Count) for name in ("num_segments", "num_rows", "num_logits")),
        *((name, _Numbers) for name in ("token_ids", "starts", "lengths", "logits", "table_starts", "tables")),
        ("out", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`struct` for the kernels, and the arrays that it points to."""

    struct: BatchStruct
    arrays: dict[str, array[int]]


def pack_batch(batch: StepBatch, out: int = 0) -> PackedBatch:
    """Return a batch whose logits go to the address `out`. Raises ValueError for a number beyond 32 bits."""
    segments = batch.segments
    tables = [segment.block_table for segment in segments]
    try:
        arrays = {
            "token_ids": _joined(segment.token_ids for segment in segments),
            "starts": array("i", [segment.start for segment in segments]),
            "lengths": array("i", [len(segment.token_ids) for segment in segments]),
            "logits": array("i", [segment.num_logits for segment in segments]),
            "table_starts": array("i", accumulate(map(len, tables), initial=0)),
            "tables": _joined(tables),
        }
    except OverflowError as error:
        raise ValueError("a number of the batch has more than 32 bits") from error
    struct = BatchStruct(
        num_segments=len(segments),
        num_rows=len(arrays["token_ids"]),
        num_logits=batch.num_logits,
        out=out,
        **{name: numbers.buffer_info()[0] for name, numbers in arrays.items()},
    )
    return PackedBatch(struct, arrays)


def raise_error(code: int, batch: StepBatch) -> None:
    """Raise what a result of the kernels means: MemoryError, ValueError, or nothing for 0."""
    if code == OUT_OF_MEMORY:
        raise MemoryError(f"no memory for a step of {batch.num_tokens} tokens")
    if code:
        raise ValueError(ERRORS[code])


def with_cache(model: ModelStruct, cache: PagedCache) -> ModelStruct:
    """Return a copy of the model's description with the addresses of a cache."""
    struct = ModelStruct.from_buffer_copy(model)
    struct.kv_format = KV_FORMATS[cache.shape.precision]
    struct.num_blocks = cache.shape.num_blocks
    struct.block_size = cache.shape.block_size
    struct.keys = cache.keys.data_ptr()
    struct.values = cache.values.data_ptr()
    if cache.key_scales is not None and cache.value_scales is not None:
        struct.key_scales = cache.key_scales.data_ptr()
        struct.value_scales = cache.value_scales.data_ptr()
    return struct


def _joined(sequences: Iterable[Sequence[int]]) -> array[int]:
    numbers = array("i")
    for sequence in sequences:
        numbers.extend(sequence)
    return numbers
