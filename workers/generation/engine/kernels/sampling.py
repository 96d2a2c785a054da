"""The compiled sampler: one call draws a token for each row of logits, on all threads and without the GIL.

Knows states and masks as the kernel reads them. The invariant: the tokens are those of `draw.draw_row`; what it cannot
take (other types, other devices) is refused before anything is read.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from workers.generation.engine.draw import is_greedy
from workers.generation.engine.kernels.library import Library, load_library
from workers.generation.engine.sampler_state import MAX_SHIFT, MIN_DIVISOR, SamplerState, bounded

NOT_FINITE = -1
NOTHING_ALLOWED = -2
_Pointer = ctypes.c_void_p
_Number = ctypes.c_int64


class Settings(ctypes.Structure):
    """`Settings` of sample.h."""

    _fields_ = (
        ("top_p", ctypes.c_double),
        *((name, ctypes.c_float) for name in ("temperature", "min_log", "factor", "divisor", "frequency", "presence")),
        *((name, _Number) for name in ("top_k", "is_greedy")),
        *((name, ctypes.c_uint64) for name in ("seed", "index")),
        *(("seen", _Pointer), ("num_seen", _Number)),
        *(("counted", _Pointer), ("counts", _Pointer), ("num_counted", _Number)),
        *(("bias_ids", _Pointer), ("bias", _Pointer), ("num_bias", _Number)),
    )


class _Described:
    """A state as the kernel reads it. Ids are appended as they come: dictionaries keep their order."""

    __slots__ = ("_counted", "_seen", "address", "settings")

    def __init__(self, state: SamplerState) -> None:
        self._seen = array("i")
        self._counted = array("i")
        self.settings = _settings(state)
        self.address = ctypes.addressof(self.settings)

    def follow(self, state: SamplerState) -> None:
        """Take up what the state has noted since."""
        settings = self.settings
        if len(state.seen) > len(self._seen):
            self._seen.extend(_newest(state.seen, len(self._seen)))
            settings.seen, settings.num_seen = self._seen.buffer_info()
        if state.counted:
            if len(state.counted) > len(self._counted):
                self._counted.extend(_newest(state.counted, len(self._counted)))
            settings.counted, settings.num_counted = self._counted.buffer_info()
            settings.counts = state.counts.buffer_info()[0]


class NativeSampler:
    """The kernel with its threads. Calls from several threads take turns."""

    def __init__(self, library: Library, num_threads: int) -> None:
        """Start the threads. Raises MemoryError where there are none left."""
        create = library.function("gea_sampler_create", _Pointer, [ctypes.c_int])
        self._sample = library.function(
            "gea_sample", ctypes.c_int, [_Pointer, _Pointer, _Number, _Number, *[_Pointer] * 4]
        )
        self._handle = create(num_threads)
        if not self._handle:
            raise MemoryError("no memory or no threads for the sampler")
        self._lock = threading.Lock()

    def draw(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplerState],
        positions: Sequence[int],
        masks: Sequence[torch.Tensor | None],
    ) -> list[int]:
        """Return a token id for each row of `logits` `(rows, vocab)` fp32; NOT_FINITE or NOTHING_ALLOWED for a row that
        has none."""
        num_rows, vocab_size = logits.shape
        described = [_describe(state, vocab_size) for state in states]
        pointers = [_mask_pointer(mask, vocab_size) for mask in masks]
        drawn = (ctypes.c_int32 * num_rows)()
        with self._lock:
            error = self._sample(
                self._handle,
                logits.data_ptr(),
                num_rows,
                vocab_size,
                (_Pointer * num_rows)(*(each.address for each in described)),
                (_Number * num_rows)(*positions),
                (_Pointer * num_rows)(*pointers),
                drawn,
            )
        if error:
            raise MemoryError("no memory to sample in")
        return list(drawn)


@functools.cache
def native_sampler() -> NativeSampler | None:
    """Return the sampler of this process with as many threads as torch has; None where no kernels can be had."""
    library = load_library()
    return None if library is None else NativeSampler(library, torch.get_num_threads())


def can_draw(logits: torch.Tensor) -> bool:
    """Say whether logits lie as the kernel reads them."""
    return logits.dtype == torch.float32 and logits.device.type == "cpu" and logits.is_contiguous() and len(logits) > 0


def _describe(state: SamplerState, vocab_size: int) -> _Described:
    assert state.vocab_size <= vocab_size, "ids beyond the logits"
    found = state.native
    if not isinstance(found, _Described):
        found = state.native = _Described(state)
    found.follow(state)
    return found


def _mask_pointer(mask: torch.Tensor | None, vocab_size: int) -> int | None:
    if mask is None:
        return None
    assert mask.dtype == torch.int32 and mask.is_contiguous() and len(mask) * 32 >= vocab_size
    return mask.data_ptr()


def _settings(state: SamplerState) -> Settings:
    params = state.params
    bias_ids, num_bias = state.bias_ids.buffer_info()
    return Settings(
        top_p=params.top_p,
        temperature=params.temperature,
        min_log=math.log(params.min_p) if params.min_p > 0 else -math.inf,
        factor=min(params.repetition_penalty, MAX_SHIFT),
        divisor=max(params.repetition_penalty, MIN_DIVISOR),
        frequency=bounded(params.frequency_penalty),
        presence=bounded(params.presence_penalty),
        top_k=params.top_k,
        is_greedy=is_greedy(params),
        seed=params.seed & 0xFFFF_FFFF_FFFF_FFFF,
        index=state.index,
        bias_ids=bias_ids,
        bias=state.bias.buffer_info()[0],
        num_bias=num_bias,
    )


def _newest(ids: dict[int, Any], known: int) -> list[int]:
    """Return the ids behind the first `known` ones, in their order."""
    newest = [token_id for token_id, _ in zip(reversed(ids), range(len(ids) - known), strict=False)]
    return newest[::-1]
