"""Memory of a CUDA device: what the allocator keeps back, what a step that was too large leaves, and swapped blocks.

Knows tensors, no sequences. The invariant: after a torch.OutOfMemoryError the allocator holds no cached memory, so that
a smaller step finds all that is free in one piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

LIBRARY_EXHAUSTED = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "out of memory")


def allocator_slack_bytes(device: torch.device) -> int:
    """Return what torch's allocator has reserved and not handed out; 0 on other devices than CUDA."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def returning_memory() -> Iterator[None]:
    """Give cached memory back to the device where a step ran out of it, and let torch.OutOfMemoryError pass on.

    cuBLAS and the driver report it as other errors, which become torch.OutOfMemoryError too.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        raise
    except RuntimeError as error:
        if not is_exhaustion(error):
            raise
        torch.cuda.empty_cache()
        raise torch.OutOfMemoryError(str(error)) from error


def is_exhaustion(error: RuntimeError) -> bool:
    """Say whether an error of a library under torch means that memory ran out."""
    return any(sign in str(error) for sign in LIBRARY_EXHAUSTED)


def read_blocks(tensors: Sequence[torch.Tensor], blocks: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return copies of blocks in page-locked host memory, `(num_layers, len(blocks), …)` of each tensor of a cache.

    The device writes there without a detour.
    """
    device = tensors[0].device
    picked = _index(blocks, device)
    parts = []
    for tensor in tensors:
        source = tensor.index_select(1, picked)  # (num_layers, len(blocks), …)
        parts.append(torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True))
    torch.cuda.current_stream(device).synchronize()  # before anybody reads, or reuses a block
    return tuple(parts)


def write_blocks(tensors: Sequence[torch.Tensor], blocks: Sequence[int], content: Sequence[torch.Tensor]) -> None:
    """Put back what `read_blocks` has returned for as many blocks, bit for bit."""
    device = tensors[0].device
    picked = _index(blocks, device)
    for tensor, part in zip(tensors, content, strict=True):
        tensor.index_copy_(1, picked, part.to(device, non_blocking=True))
    torch.cuda.current_stream(device).synchronize()  # `content` may be freed or overwritten afterwards


def _index(blocks: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(blocks), dtype=torch.int64, device=device)  # (len(blocks),)
