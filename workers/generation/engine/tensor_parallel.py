"""Runs one Llama-family model over several local processes, each with some of its heads, units and vocabulary.

The first rank runs in the engine's thread, the others in processes of their own (see `RankProcess`). Blocks have the
same numbers on all ranks; the content of a block is handed out as that of one cache with all heads. The invariant: a
rank that is gone ends every later step with an error, in bounded time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch

from schemas.errors import ConfigError, EngineUnavailableError
from workers.generation.engine.batch import BlockCache, CacheLayout, StepBatch
from workers.generation.engine.tensor_parallel_process import RankProcess
from workers.generation.engine.tensor_parallel_rank import (
    ClearBlocks,
    Command,
    CopyBlock,
    Forward,
    Rank,
    RankPlan,
    ReadBlocks,
    Reply,
    ReplyKind,
    WriteBlocks,
    from_arrays,
    to_arrays,
)

HEADS_DIM = 2  # of the tensors of a paged cache
Result = TypeVar("Result")


class TensorParallelRunner:
    """A `ModelRunner` over `plan.size` ranks. `identity` names weights and precision.

    The same weights split otherwise round otherwise, so the size of the group becomes part of the cache's identity.
    """

    def __init__(self, plan: RankPlan, *, vocab_size: int, identity: str) -> None:
        """Start the processes and load all ranks at the same time.

        Raises ConfigError for a model or a machine that cannot be split so, EngineUnavailableError where a process does
        not come up.
        """
        _check_devices(plan)
        self._layout = plan.shape.layout(f"{identity}/tp{plan.size}")
        self._vocab_size, self._timeout_s = vocab_size, plan.timeout_s
        self._failure: EngineUnavailableError | None = None
        self._others: list[RankProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="gea-ranks-")
        meeting = Path(self._folder.name) / "meeting"
        try:
            for rank in range(1, plan.size):
                self._others.append(RankProcess(plan, meeting, rank))
            self._replies(plan.start_s)  # they have imported torch
            self._first = Rank(plan, meeting, 0)
            self._replies(plan.start_s)  # they have loaded
        except BaseException:
            self._kill()
            raise

    @property
    def cache(self) -> BlockCache:
        """Return the cache over all ranks: this object, which asks each of them."""
        return self

    @property
    def layout(self) -> CacheLayout:
        """Return the shape of the cache, over all ranks."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Return the number of columns of the logits."""
        return self._vocab_size

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Return the numbers of the other ranks' processes."""
        return tuple(other.pid for other in self._others)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return logits `(batch.num_logits, vocab_size)` fp32 on the CPU.

        Raises MemoryError where a rank is out of memory, EngineUnavailableError where one is gone.
        """
        logits, _ = self._run([Forward(batch)] * len(self._others), lambda: self._first.forward(batch))
        return logits[:, : self._vocab_size]

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        command = CopyBlock(source, target)
        self._run([command] * len(self._others), lambda: self._first.runner.cache.copy_block(source, target))

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Set blocks to zeros."""
        command = ClearBlocks(tuple(blocks))
        self._run([command] * len(self._others), lambda: self._first.runner.cache.clear_blocks(blocks))

    def read_blocks(self, blocks: Sequence[int]) -> object:
        """Return copies of blocks, as of one cache with all heads."""
        command = ReadBlocks(tuple(blocks))
        own, replies = self._run([command] * len(self._others), lambda: self._first.runner.cache.read_blocks(blocks))
        parts = [cast(Sequence[torch.Tensor], own), *(from_arrays(reply.content) for reply in replies)]
        return tuple(torch.cat(tensors, dim=HEADS_DIM) for tensors in zip(*parts, strict=True))

    def write_blocks(self, blocks: Sequence[int], content: object) -> None:
        """Put back what `read_blocks` has returned, bit for bit."""
        whole = cast(Sequence[torch.Tensor], content)
        split = [tensor.chunk(len(self._others) + 1, dim=HEADS_DIM) for tensor in whole]
        own, *parts = zip(*split, strict=True)
        commands = [WriteBlocks(tuple(blocks), to_arrays(part)) for part in parts]
        self._run(commands, lambda: self._first.runner.cache.write_blocks(blocks, own))

    def allocator_slack_bytes(self) -> int:
        """Return what the first rank's allocator has reserved and not handed out."""
        return self._first.runner.allocator_slack_bytes()

    def close(self) -> None:
        """End the processes and free this rank's weights and cache. Idempotent."""
        self._failure = self._failure or EngineUnavailableError("the engine has stopped")
        for other in self._others:
            other.ask_to_end()
        for other in self._others:
            other.join()
        self._folder.cleanup()
        self._first.runner.close()

    def _run(self, commands: Sequence[Command], own: Callable[[], Result]) -> tuple[Result, list[Reply]]:
        """Have every other rank do its command while the first does its own; all are done when this returns."""
        if self._failure is not None:
            raise EngineUnavailableError(self._failure.message)
        try:
            for other, command in zip(self._others, commands, strict=True):
                other.send(command)
            try:
                result = own()
            finally:
                replies = self._replies(self._timeout_s)
        except EngineUnavailableError as error:
            self._failure = error
            self._kill()
            raise
        for reply in replies:
            if reply.kind is not ReplyKind.DONE:
                failure = MemoryError if reply.kind is ReplyKind.MEMORY else RuntimeError
                raise failure(f"another rank failed: {reply.text}")
        return result, replies

    def _replies(self, timeout_s: float) -> list[Reply]:
        """Return one reply of each other rank."""
        return [other.receive(timeout_s) for other in self._others]

    def _kill(self) -> None:
        for other in self._others:
            other.kill()
        self._folder.cleanup()


def _check_devices(plan: RankPlan) -> None:
    if plan.device_type != "cpu" and torch.cuda.device_count() < plan.size:
        raise ConfigError(
            f"generation.local.tensor_parallel: {plan.size} ranks need a CUDA device each,"
            f" here are {torch.cuda.device_count()}"
        )
