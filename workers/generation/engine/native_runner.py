"""Runs a packed model over a paged cache in C++: one call for a whole step, without the GIL.

Knows batches and the structures of `kernels/source/model.h`; scheduling and sampling are elsewhere. The invariant: the
logits of a row are the same bits whatever stands beside it, however its prompt was cut, on any number of threads.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

from schemas.errors import ConfigError
from workers.generation.engine.batch import CacheLayout, StepBatch
from workers.generation.engine.native_model import ModelStruct, NativeModel
from workers.generation.engine.paged_cache import CacheShape, PagedCache
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


class NativeRunner:
    """A `ModelRunner` over a packed model and a cache of its own. `identity` names weights and precision."""

    def __init__(self, model: NativeModel, shape: CacheShape, *, identity: str, num_threads: int) -> None:
        """Allocate the cache and start the threads. Raises ConfigError for a block size that the kernels lack."""
        if shape.block_size % 8:
            raise ConfigError(f"generation.local.block_size: {shape.block_size} is no multiple of 8")
        self._model: NativeModel | None = model
        self._cache = PagedCache(shape, torch.device("cpu"))
        self._layout = shape.layout(identity)
        self._vocab_size = model.config.vocab_size
        library, handle = model.library, ctypes.c_void_p
        create = library.function("gea_model_create", handle, [ctypes.POINTER(ModelStruct), _Count])
        self._forward = library.function("gea_model_forward", ctypes.c_int, [handle, ctypes.POINTER(BatchStruct)])
        self._destroy = library.function("gea_model_destroy", None, [handle])
        self._activation_bytes = library.function("gea_model_activation_bytes", _Count, [handle])
        self._handle = create(ctypes.byref(_with_cache(model.struct, self._cache)), num_threads)
        if not self._handle:
            raise MemoryError(f"no memory or no threads for a model on {num_threads} threads")

    @property
    def cache(self) -> PagedCache:
        """Return the cache that steps read and write."""
        return self._cache

    @property
    def layout(self) -> CacheLayout:
        """Return the shape of the cache."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Return the number of columns of the logits."""
        return self._vocab_size

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of the packed weights."""
        return 0 if self._model is None else self._model.weights_bytes

    @property
    def activation_bytes(self) -> int:
        """Return the bytes of memory between the layers, enough for the largest step so far."""
        return int(self._activation_bytes(self._handle)) if self._handle else 0

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return logits `(batch.num_logits, vocab_size)` fp32.

        Raises ValueError for a batch that does not fit model or cache; nothing is written then.
        """
        if not self._handle:
            raise ValueError("the model is closed")
        try:
            logits = torch.empty((batch.num_logits, self._vocab_size))  # (num_logits, vocab)
        except RuntimeError as error:
            raise MemoryError(f"no memory for {batch.num_logits} rows of logits") from error
        if batch.segments:
            self._run(batch, logits)
        return logits

    def _run(self, batch: StepBatch, logits: torch.Tensor) -> None:
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
            num_logits=len(logits),
            out=logits.data_ptr(),
            **{name: numbers.buffer_info()[0] for name, numbers in arrays.items()},
        )
        code = self._forward(self._handle, ctypes.byref(struct))
        if code == OUT_OF_MEMORY:
            raise MemoryError(f"no memory for a step of {batch.num_tokens} tokens")
        if code:
            raise ValueError(ERRORS[code])

    def allocator_slack_bytes(self) -> int:
        """Return 0: nothing is reserved that is not handed out."""
        return 0

    def close(self) -> None:
        """End the threads; drop weights and cache. Idempotent."""
        handle, self._handle = self._handle, None
        if handle:
            self._destroy(handle)
        self._model = None
        self.__dict__.pop("_cache", None)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _joined(sequences: Iterable[Sequence[int]]) -> array[int]:
    numbers = array("i")
    for sequence in sequences:
        numbers.extend(sequence)
    return numbers


def _with_cache(model: ModelStruct, cache: PagedCache) -> ModelStruct:
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
