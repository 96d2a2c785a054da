"""Runs a packed model over a paged cache in C++: one call for a whole step, without the GIL.

Knows batches and one handle of the library; scheduling and sampling are elsewhere. The invariant: the logits of a row
are the same bits whatever stands beside it, however its prompt was cut, on any number of threads.
"""

from __future__ import annotations

import ctypes

import torch

from schemas.errors import ConfigError
from workers.generation.engine.batch import CacheLayout, StepBatch
from workers.generation.engine.native_batch import BatchStruct, pack_batch, raise_error, with_cache
from workers.generation.engine.native_model import ModelStruct, NativeModel
from workers.generation.engine.paged_cache import CacheShape, PagedCache

_Count = ctypes.c_int64


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
        self._handle = create(ctypes.byref(with_cache(model.struct, self._cache)), num_threads)
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
        packed = pack_batch(batch, logits.data_ptr())
        raise_error(self._forward(self._handle, ctypes.byref(packed.struct)), batch)

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
