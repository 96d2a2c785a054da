"""The sums and gathers over the ranks of one tensor-parallel model, on this machine alone.

Knows tensors, no model. It stands beside torch's global process group, so that a process may have several. The
invariant: every rank makes the same collectives in the same order; `StepReducer` makes up for a rank that failed amid a
step, so that an error on one of them costs the step and not the group.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from schemas.errors import EngineUnavailableError

c10d: Any = dist  # whose stubs leave out most of it


class RankGroup:
    """One rank's end of a group. Raises EngineUnavailableError where another rank is gone or does not answer."""

    def __init__(
        self, path: Path, rank: int, size: int, *, device: torch.device, start_s: float, timeout_s: float
    ) -> None:
        """Meet the other ranks at a file that none of another group has written to, within `start_s`.

        `timeout_s` bounds each sum and gather.
        """
        self.rank, self.size = rank, size
        start, timeout = timedelta(seconds=start_s), timedelta(seconds=timeout_s)
        store = c10d.FileStore(str(path), size)
        store.set_timeout(start)
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = start
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        try:
            self._host = c10d.ProcessGroupGloo(c10d.PrefixStore("host", store), rank, size, options)
            self._host._set_default_timeout(timeout)
            self._device = self._host if device.type == "cpu" else _nccl(store, rank, size, timeout)
        except RuntimeError as error:
            raise _gone(error) from error

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Replace `part` by the sum of all ranks' parts, and return it."""
        try:
            self._device.allreduce([part]).wait()
        except RuntimeError as error:
            raise _gone(error) from error
        return part

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        """Return on rank 0 all ranks' `(rows, columns)` side by side, on the others `part` itself; all on the CPU."""
        part = part.contiguous()
        parts = [[torch.empty_like(part) for _ in range(self.size)]] if self.rank == 0 else []
        try:
            self._host.gather(parts, [part], _to_first()).wait()
        except RuntimeError as error:
            raise _gone(error) from error
        return torch.cat(parts[0], dim=1) if parts else part


class StepReducer:
    """The sums over ranks of one step: `num_reductions` of `(T, width)` each."""

    def __init__(self, group: RankGroup, *, num_reductions: int, like: torch.Tensor) -> None:
        """`like` `(…, width)` has the number format and the device of the sums, if the first one never comes."""
        self._group, self._num_reductions, self._like = group, num_reductions, like
        self._num_done = 0

    def begin(self) -> None:
        """Note that a step begins."""
        self._num_done = 0

    def __call__(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' `part` `(T, width)`; `part` is overwritten."""
        self._num_done += 1
        return self._group.all_reduce(part)

    def skip_rest(self, num_tokens: int) -> None:
        """Add zeros to the sums that the others still wait for in this step."""
        while self._num_done < self._num_reductions:
            self(self._like.new_zeros((num_tokens, self._like.shape[-1])))


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return c10d.ProcessGroupNCCL(c10d.PrefixStore("device", store), rank, size, options)


def _to_first() -> Any:
    options = c10d.GatherOptions()
    options.rootRank = 0
    return options


def _gone(error: RuntimeError) -> EngineUnavailableError:
    return EngineUnavailableError(f"a rank of the tensor-parallel model is gone: {error}")
