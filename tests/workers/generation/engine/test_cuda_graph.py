from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.cuda_graph import (
    MAX_ROWS,
    DecodeGraphs,
    DecodeRows,
    Step,
    buffer_size,
    fill,
    fitting_size,
    graph_sizes,
    is_decode,
    views,
)

BLOCK_SIZE, NUM_BLOCKS, MAX_BLOCKS, VOCAB = 4, 12, 3, 8
SCRATCH = NUM_BLOCKS
CPU = torch.device("cpu")


class Adder:
    """A model whose logits are the sum of the tokens in sight, over a paged cache of tokens."""

    def __init__(self) -> None:
        self.cache = torch.zeros((NUM_BLOCKS + 1, BLOCK_SIZE), dtype=torch.int64)
        self.num_steps = 0

    def decode(self, rows: DecodeRows) -> torch.Tensor:
        self.num_steps += 1
        places = rows.positions.long()
        blocks = rows.tables.long().gather(1, places[:, None] // BLOCK_SIZE).squeeze(1)
        self.cache[blocks, places % BLOCK_SIZE] = rows.token_ids.long()
        seen = self.cache[rows.tables.long()].flatten(1)  # (N, max_blocks block_size)
        visible = torch.arange(seen.shape[1]) < rows.lengths[:, None]
        return (seen * visible).sum(1, keepdim=True).float().expand(-1, VOCAB)


def graphs(model: Adder, *, max_rows: int = 16) -> DecodeGraphs:
    return DecodeGraphs(
        model.decode,
        max_rows=max_rows,
        max_blocks=MAX_BLOCKS,
        scratch_block=SCRATCH,
        vocab_size=VOCAB,
        device=CPU,
        recorder=run_and_keep,
    )


def run_and_keep(step: Step) -> Step:
    step()
    return step


def decode(token_id: int, start: int, *table: int) -> Segment:
    return Segment(token_ids=(token_id,), start=start, block_table=table)


@given(st.integers(1, 2 * MAX_ROWS))
def test_sizes_hold_every_number_of_rows_with_little_padding(max_rows: int) -> None:
    sizes = graph_sizes(max_rows)
    assert sorted(set(sizes)) == list(sizes)
    for num_rows in range(1, min(max_rows, MAX_ROWS) + 1):
        size = fitting_size(num_rows, sizes)
        assert size is not None and num_rows <= size <= max(num_rows + 31, 2)
        assert size in (1, 2, 4) or size % 8 == 0


def test_sizes_of_the_default_number_of_sequences() -> None:
    assert graph_sizes(32) == (1, 2, 4, 8, 16, 24, 32)
    assert len(graph_sizes(10_000)) == 17


def test_no_rows_and_too_many_rows_fit_no_graph() -> None:
    assert fitting_size(0, graph_sizes(8)) is None
    assert fitting_size(9, graph_sizes(8)) is None


def test_prompt_chunk_is_no_decode_but_drafts_are() -> None:
    draft = Segment(token_ids=(1, 2, 3), start=4, block_table=(0, 1), num_logits=3)
    chunk = Segment(token_ids=(1, 2, 3), start=0, block_table=(2,), num_logits=1)
    assert is_decode(StepBatch(segments=(decode(1, 0, 3), draft)))
    assert not is_decode(StepBatch(segments=(decode(1, 0, 3), chunk)))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3)), max_size=3), st.integers(0, 1_000))
def test_filled_rows_are_those_of_the_batch_and_idle_ones_stay_in_the_scratch_block(
    shapes: list[tuple[int, int]], stale: int
) -> None:
    segments = tuple(
        Segment(token_ids=range(10, 10 + count), start=start, block_table=(number, 5), num_logits=count)
        for number, (start, count) in enumerate(shapes)
    )
    batch, size = StepBatch(segments=segments), 16
    buffer = torch.full((buffer_size(size, MAX_BLOCKS) + 5,), stale, dtype=torch.int32)
    fill(batch, size, MAX_BLOCKS, SCRATCH, buffer)
    rows, row = views(buffer, size, MAX_BLOCKS), 0
    for number, (start, count) in enumerate(shapes):
        for offset in range(count):
            assert (int(rows.token_ids[row]), int(rows.positions[row])) == (10 + offset, start + offset)
            assert int(rows.lengths[row]) == start + offset + 1
            assert rows.tables[row].tolist() == [number, 5, SCRATCH]
            row += 1
    assert rows.positions[row:].tolist() == [0] * (size - row)
    assert rows.lengths[row:].tolist() == [1] * (size - row)
    assert bool((rows.tables[row:] == SCRATCH).all())
    assert bool((buffer[buffer_size(size, MAX_BLOCKS) :] == stale).all())


def test_replay_equals_the_step_as_it_is_and_writes_no_other_block() -> None:
    model, plain = Adder(), Adder()
    recorded = graphs(model)
    recorded.record()
    draft = Segment(token_ids=(7, 9), start=3, block_table=(4, 2), num_logits=2)
    steps = [(decode(5, 0, 1),), (decode(6, 1, 1), decode(3, 0, 4), decode(2, 0, 5)), (draft, decode(4, 2, 1))]
    for segments in steps:
        batch = StepBatch(segments=segments)
        assert recorded.can_run(batch)
        buffer = torch.zeros(buffer_size(batch.num_tokens, MAX_BLOCKS), dtype=torch.int32)
        fill(batch, batch.num_tokens, MAX_BLOCKS, SCRATCH, buffer)
        wanted = plain.decode(views(buffer, batch.num_tokens, MAX_BLOCKS))
        assert torch.equal(recorded.run(batch), wanted)
    assert torch.equal(model.cache[:SCRATCH], plain.cache[:SCRATCH])


def test_drafted_tokens_see_the_ones_before_them() -> None:
    recorded = graphs(Adder())
    recorded.record()
    draft = Segment(token_ids=(1, 2, 4), start=0, block_table=(3,), num_logits=3)
    assert recorded.run(StepBatch(segments=(draft,)))[:, 0].tolist() == [1, 3, 7]


def test_longer_context_than_the_graphs_have_room_for_is_run_as_it_is() -> None:
    recorded = graphs(Adder())
    recorded.record()
    assert recorded.can_run(StepBatch(segments=(decode(1, 0, 1, 2, 3),)))
    assert not recorded.can_run(StepBatch(segments=(decode(1, 0, 1, 2, 3, 4),)))


def test_nothing_runs_before_it_is_recorded() -> None:
    model = Adder()
    assert not graphs(model).can_run(StepBatch(segments=(decode(1, 0, 0),)))
    assert model.num_steps == 0


def test_sizes_that_run_out_of_memory_are_left_out() -> None:
    class Large(Adder):
        def decode(self, rows: DecodeRows) -> torch.Tensor:
            if len(rows.token_ids) > 4:
                raise torch.OutOfMemoryError("too large")
            return super().decode(rows)

    recorded = graphs(Large())
    recorded.record()
    assert recorded.sizes == (1, 2, 4)
    many = StepBatch(segments=tuple(decode(1, 0, number) for number in range(5)))
    assert not recorded.can_run(many)
    assert recorded.can_run(StepBatch(segments=many.segments[:3]))
