"""One rank of a tensor-parallel model, and the loop of the processes that run all ranks but the first.

Knows a runner of its share and the group. A process of a rank does what its pipe says, one command after the other,
and ends with its parent, however that ends. The invariant: each command gets one reply, whatever happens.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing import connection, parent_process
from pathlib import Path
from typing import Any, cast

import torch

from schemas.errors import ConfigError, EngineUnavailableError
from workers.generation.engine.batch import ModelRunner, StepBatch
from workers.generation.engine.linear import activation_dtype
from workers.generation.engine.model import LlamaModel
from workers.generation.engine.model_runner import TorchRunner
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import Precision
from workers.generation.engine.tensor_parallel_group import RankGroup, StepReducer
from workers.generation.engine.tensor_parallel_shard import ShardedSource, vocab_rows
from workers.generation.engine.weight_source import WeightSource


class ReplyKind(StrEnum):
    """What became of a command."""

    DONE = "done"
    """It is done."""
    CONFIG = "config"
    """The model cannot be run so."""
    MEMORY = "memory"
    """The rank is out of memory; it goes on."""
    FAILED = "failed"
    """It failed in another way; the rank goes on."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one command. `content` is what was read, as arrays."""

    kind: ReplyKind = ReplyKind.DONE
    text: str = ""
    content: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a step."""

    batch: StepBatch


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy a block."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class ClearBlocks:
    """Set blocks to zeros."""

    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class ReadBlocks:
    """Reply with the content of blocks."""

    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class WriteBlocks:
    """Put back the content of blocks."""

    blocks: Sequence[int]
    content: Sequence[Any]


Command = Forward | CopyBlock | ClearBlocks | ReadBlocks | WriteBlocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """How the ranks are made; sent to their processes, so `open_source` is importable by name, or a partial of such.

    `shape` is that of a cache with all heads. `start_s` bounds the start, an import of torch and the reading of a share
    of the weights, and `timeout_s` each wait of a step; `num_threads` are those of each rank.
    """

    size: int
    open_source: Callable[[], WeightSource]
    shape: CacheShape
    precision: Precision
    max_context: int
    device_type: str
    num_threads: int
    start_s: float = 300.0
    timeout_s: float = 60.0

    def device(self, rank: int) -> torch.device:
        """Return the device of a rank: the CPU, or one CUDA device each."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, rank)


class Rank:
    """One rank's share of the model, with its heads' part of the cache."""

    def __init__(self, plan: RankPlan, meeting: Path, rank: int) -> None:
        """Meet the other ranks at a file, then load. Raises ConfigError for a model that cannot be split so."""
        torch.set_num_threads(plan.num_threads)
        device = plan.device(rank)
        source = ShardedSource(plan.open_source(), rank, plan.size)
        config = source.config
        self._vocab_rows = vocab_rows(config, plan.size)
        self._group = RankGroup(meeting, rank, plan.size, device=device, start_s=plan.start_s, timeout_s=plan.timeout_s)
        like = torch.empty((0, config.hidden_size), dtype=activation_dtype(plan.precision, device), device=device)
        self.reduce = StepReducer(self._group, num_reductions=2 * config.num_layers, like=like)
        model = LlamaModel(
            source, precision=plan.precision, device=device, max_context=plan.max_context, reduce=self.reduce
        )
        shape = replace(plan.shape, num_kv_heads=config.num_kv_heads)
        self.runner: ModelRunner = TorchRunner(model, shape, identity="")

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return on rank 0 the logits `(num_logits, size * vocab_rows)`, on the others their own columns.

        Where this rank fails, it still makes the collectives that the others wait for, and raises behind them.
        """
        self.reduce.begin()
        failure = None
        try:
            own = self.runner.forward(batch)  # (num_logits, vocab_rows)
        except EngineUnavailableError:
            raise
        except Exception as error:
            failure = error
            self.reduce.skip_rest(batch.num_tokens)
            own = torch.zeros((batch.num_logits, self._vocab_rows))
        logits = self._group.gather_columns(own) if batch.num_logits else own
        if failure is not None:
            raise failure
        return logits


def serve_rank(pipe: connection.Connection, plan: RankPlan, meeting: Path, rank: int) -> None:
    """Run a rank in a process of its own until the pipe ends: the target of the process."""
    threading.Thread(target=_end_with_parent, name="gea-rank-watch", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the parent, which drains first
        signal.signal(number, signal.SIG_IGN)
    try:
        pipe.send(Reply())  # torch is imported: from here on it goes fast
        served = Rank(plan, meeting, rank)
    except ConfigError as error:
        pipe.send(Reply(ReplyKind.CONFIG, error.message))
        return
    pipe.send(Reply())
    _serve(pipe, served)
    os._exit(0)  # there is nothing to put away, and taking torch down takes seconds


def _serve(pipe: connection.Connection, rank: Rank) -> None:
    while True:
        try:
            command: Command = pipe.recv()
        except EOFError:
            return
        try:
            reply = Reply(content=_do(rank, command))
        except EngineUnavailableError:
            return  # without the others there is nothing left to do
        except (MemoryError, torch.OutOfMemoryError) as error:
            reply = Reply(ReplyKind.MEMORY, str(error))
        except Exception as error:
            reply = Reply(ReplyKind.FAILED, repr(error))
        pipe.send(reply)


def _do(rank: Rank, command: Command) -> Sequence[Any]:
    match command:
        case Forward(batch):
            rank.forward(batch)
        case CopyBlock(source, target):
            rank.runner.cache.copy_block(source, target)
        case ClearBlocks(blocks):
            rank.runner.cache.clear_blocks(blocks)
        case ReadBlocks(blocks):
            return to_arrays(cast(Sequence[torch.Tensor], rank.runner.cache.read_blocks(blocks)))
        case WriteBlocks(blocks, content):
            rank.runner.cache.write_blocks(blocks, from_arrays(content))
    return ()


def to_arrays(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return tensors as arrays of bytes with their number formats, for a pipe."""
    return [(tensor.contiguous().view(torch.uint8).numpy(), tensor.dtype) for tensor in tensors]


def from_arrays(arrays: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that `to_arrays` was given."""
    return [torch.from_numpy(array).view(dtype) for array, dtype in arrays]


def _end_with_parent() -> None:
    """End this process when its parent is gone, even amid a collective or a load."""
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    os._exit(1)
