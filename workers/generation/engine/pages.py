"""Memory in whole pages, straight from the system, for what is large: taken as it is touched, given back at once.

malloc keeps what is freed, since it lies between what is not: a load that went through it kept 200 MB. Knows no models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from mmap import mmap

import torch

MIN_BYTES = 1 << 18  # smaller ones are cheaper to allocate, and many


def page_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in an anonymous mapping of their own, which ends with the tensor. Raises MemoryError."""
    num_bytes = prod(shape) * dtype.itemsize
    try:
        pages = mmap(-1, num_bytes)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be mapped: {error}") from error
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor to fill, in pages of its own where it is large. Raises MemoryError."""
    if prod(shape) * dtype.itemsize < MIN_BYTES:
        return torch.empty(*shape, dtype=dtype)
    return page_zeros(shape, dtype)


def return_freed() -> None:
    """Give the system back what malloc has kept of freed memory, where it can (glibc). Takes milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
