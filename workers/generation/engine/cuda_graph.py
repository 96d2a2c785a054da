"""Decode steps that are recorded once for each number of rows and replayed: one launch instead of hundreds.

Knows rows of token ids, positions and block tables, not the model that it records. The invariants: rows that only fill
a graph up write to a scratch block that no sequence has; and a graph reads nothing but its input buffer, the weights
and the cache, so that a replay is the step that was recorded with other numbers.

CUDA graphs: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs. Tensor cores work on 8 rows at once,
hence the sizes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.generation.engine.batch import StepBatch

SMALL_SIZES = (1, 2, 4)
MAX_ROWS = 256  # a step of more rows computes longer than its launches take
COARSE_FROM, FINE_STEP, COARSE_STEP = 64, 8, 32  # few graphs: each costs a few MB and a tenth of a second at the start
NUM_SCALARS = 3  # token id, position, length

Step = Callable[[], None]
Recorder = Callable[[Step], Step]
"""Runs a step, and returns what runs it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """One token of each row, on the device: `token_ids`, `positions` and `lengths` `(N,)`, `tables` `(N, max_blocks)`.

    All int32. `lengths` count the positions that a row attends to, its own among them. Rows may be of one sequence: a
    later token of a draft attends to the earlier ones, which are written first.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows that are recorded, ascending; the last is `max_rows` or more, or MAX_ROWS."""
    most = min(max_rows, MAX_ROWS)
    fine = range(FINE_STEP, COARSE_FROM, FINE_STEP)
    coarse = range(COARSE_FROM, MAX_ROWS + 1, COARSE_STEP)
    sizes = (*SMALL_SIZES, *fine, *coarse)
    return sizes[: bisect_left(sizes, most) + 1]


def fitting_size(num_rows: int, sizes: tuple[int, ...]) -> int | None:
    """Return the smallest size that holds so many rows, None if none does."""
    place = bisect_left(sizes, num_rows)
    return sizes[place] if num_rows > 0 and place < len(sizes) else None


def is_decode(batch: StepBatch) -> bool:
    """Say whether every row wants its logits: last tokens and drafts, no chunk of a prompt but its very last token."""
    return all(segment.num_logits == len(segment.token_ids) for segment in batch.segments)


def fill(batch: StepBatch, size: int, max_blocks: int, scratch_block: int, buffer: torch.Tensor) -> None:
    """Write the rows of a batch into `buffer` int32 on the CPU, as `views` reads them; the rest become idle rows."""
    rows = views(buffer, size, max_blocks)
    rows.token_ids.zero_()
    rows.positions.zero_()
    rows.lengths.fill_(1)
    rows.tables.fill_(scratch_block)
    tables, row = rows.tables.numpy(), 0
    for segment in batch.segments:
        count = len(segment.token_ids)
        until = row + count
        rows.token_ids[row:until] = torch.tensor(segment.token_ids, dtype=torch.int32)
        rows.positions[row:until] = torch.arange(segment.start, segment.end, dtype=torch.int32)
        rows.lengths[row:until] = rows.positions[row:until] + 1
        tables[row:until, : len(segment.block_table)] = segment.block_table  # (count, blocks), each row the same
        row = until


def views(buffer: torch.Tensor, size: int, max_blocks: int) -> DecodeRows:
    """Return the rows that lie in the first `size` (NUM_SCALARS + max_blocks) numbers of a flat buffer."""
    used = buffer[: buffer_size(size, max_blocks)]
    scalars, tables = used[: NUM_SCALARS * size].view(NUM_SCALARS, size), used[NUM_SCALARS * size :]
    return DecodeRows(
        token_ids=scalars[0], positions=scalars[1], lengths=scalars[2], tables=tables.view(size, max_blocks)
    )


def buffer_size(size: int, max_blocks: int) -> int:
    """Return the numbers of a buffer for so many rows."""
    return size * (NUM_SCALARS + max_blocks)


class DecodeGraphs:
    """The graphs of one model on one device. `decode` maps rows to logits `(N, vocab_size)` without asking the host."""

    def __init__(
        self,
        decode: Callable[[DecodeRows], torch.Tensor],
        *,
        max_rows: int,
        max_blocks: int,
        scratch_block: int,
        vocab_size: int,
        device: torch.device,
        recorder: Recorder,
    ) -> None:
        self._decode = decode
        self._max_blocks, self._scratch_block = max_blocks, scratch_block
        self._sizes = graph_sizes(max_rows)
        self._recorder = recorder
        numbers = buffer_size(self._sizes[-1], max_blocks)
        self._host = torch.empty(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.empty(numbers, dtype=torch.int32, device=device)
        self._logits = torch.empty(
            (self._sizes[-1], vocab_size), device=device
        )  # one for all graphs: they never overlap
        self._replays: dict[int, Step] = {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of rows that are recorded."""
        return tuple(sorted(self._replays))

    def record(self) -> None:
        """Record all sizes, the largest first: its memory serves the others.

        Where memory runs out, what has been recorded stays and the other sizes run as they are.
        """
        for size in reversed(self._sizes):
            fill(StepBatch(segments=()), size, self._max_blocks, self._scratch_block, self._host)
            self._device.copy_(self._host)
            try:
                self._replays[size] = self._recorder(self._step(size))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        self._sizes = self.sizes

    def can_run(self, batch: StepBatch) -> bool:
        """Say whether a graph holds this step."""
        longest = max((len(segment.block_table) for segment in batch.segments), default=0)
        has_size = fitting_size(batch.num_tokens, self._sizes) in self._replays
        return has_size and longest <= self._max_blocks and is_decode(batch)

    def run(self, batch: StepBatch) -> torch.Tensor:
        """Return logits `(batch.num_logits, vocab_size)` fp32 on the device, valid until the next step."""
        size = fitting_size(batch.num_tokens, self._sizes)
        assert size is not None, "can_run says which steps"
        fill(batch, size, self._max_blocks, self._scratch_block, self._host)
        used = buffer_size(size, self._max_blocks)
        self._device[:used].copy_(self._host[:used], non_blocking=True)
        self._replays[size]()
        return self._logits[: batch.num_tokens]

    def _step(self, size: int) -> Step:
        rows = views(self._device, size, self._max_blocks)

        def step() -> None:
            self._logits[:size].copy_(self._decode(rows))

        return step


def cuda_recorder(device: torch.device) -> Recorder:
    """Return what records CUDA graphs that share one pool of memory."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def record(step: Step) -> Step:
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()  # once as it is: libraries allocate and compile at the first call, which a recording forbids
        current.wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
        return lambda: graph.replay()

    return record
