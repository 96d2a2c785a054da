"""A row's logits are the same bits whatever stands beside it, however its prompt was cut, on any number of threads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch

from tests.workers.generation.engine.native_reference import (
    TINY,
    Formats,
    RandomSource,
    changed,
    make_runner,
    prompt_segment,
    random_ids,
    run_in_chunks,
)
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.native_runner import NativeRunner
from workers.generation.engine.protocol import KVPrecision, Precision

CASES = [
    Formats(weights, cache)
    for weights, cache in (
        (Precision.FP32, KVPrecision.FP32),
        (Precision.BF16, KVPrecision.BF16),
        (Precision.FP16, KVPrecision.FP16),
        (Precision.INT8, KVPrecision.FP16),
        (Precision.INT8, KVPrecision.INT8),
    )
]
BLOCKS_EACH = 20
NUM_NEIGHBOURS = 32


def own_blocks(number: int) -> range:
    """Return blocks that belong to one sequence of a test."""
    return range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH)


def cached(ids: Sequence[int], number: int) -> Segment:
    """Return the last token of a sequence whose others are in the cache."""
    return Segment(token_ids=ids[-1:], start=len(ids) - 1, block_table=own_blocks(number))


@pytest.mark.parametrize("formats", CASES)
def test_a_decoding_row_is_the_same_among_any_neighbours_in_any_order(formats: Formats) -> None:
    runner = make_runner(RandomSource(TINY), formats, num_blocks=BLOCKS_EACH * (NUM_NEIGHBOURS + 1))
    prompts = [random_ids(1 + 7 * number % 190, seed=number) for number in range(NUM_NEIGHBOURS + 1)]
    alone = []
    for number, ids in enumerate(prompts):
        runner.forward(StepBatch(segments=(prompt_segment(ids, own_blocks(number), num_logits=0),)))
        alone.append(runner.forward(StepBatch(segments=(cached(ids, number),)))[0])
    shuffled = random.Random(5)
    for size in (1, 2, 3, 5, 6, 7, 12, 13, 33):
        chosen = shuffled.sample(range(len(prompts)), size)
        rows = runner.forward(StepBatch(segments=tuple(cached(prompts[number], number) for number in chosen)))
        for row, number in zip(rows, chosen, strict=True):
            assert torch.equal(row, alone[number])


@pytest.mark.parametrize("formats", CASES)
@pytest.mark.parametrize("windows", [(None, None), (20, None)])
def test_a_prompt_may_be_cut_anyhow(formats: Formats, windows: tuple[int | None, ...]) -> None:
    source = RandomSource(changed(windows=windows, num_heads=6))
    runner = make_runner(source, formats)
    ids = random_ids(150)
    whole = run_in_chunks(runner, ids, range(10), (150,))
    for lengths in ((1,), (2,), (7,), (16,), (17, 1), (100, 50), (1, 140, 1), (127, 2, 20)):
        assert torch.equal(run_in_chunks(runner, ids, range(20, 30), lengths), whole)


@pytest.mark.parametrize("formats", CASES)
def test_a_chunk_beside_decoding_rows_changes_neither(formats: Formats) -> None:
    runner = make_runner(RandomSource(TINY), formats, num_blocks=3 * BLOCKS_EACH)
    ids, other = random_ids(200, seed=1), random_ids(40, seed=2)
    chunk = Segment(token_ids=ids[30:], start=30, block_table=own_blocks(0), num_logits=3)
    runner.forward(StepBatch(segments=(prompt_segment(ids[:30], own_blocks(0)), prompt_segment(other, own_blocks(1)))))
    alone = [runner.forward(StepBatch(segments=(segment,))) for segment in (chunk, cached(other, 1))]
    together = runner.forward(StepBatch(segments=(cached(other, 1), chunk)))
    assert torch.equal(together, torch.cat((alone[1], alone[0])))


@pytest.mark.parametrize("formats", CASES)
def test_drafted_tokens_have_the_logits_of_plain_decoding(formats: Formats) -> None:
    runner = make_runner(RandomSource(TINY), formats)
    ids = random_ids(60)
    plain = run_in_chunks(runner, ids, range(10), (1,))
    runner.forward(StepBatch(segments=(prompt_segment(ids[:50], range(10, 20), num_logits=0),)))
    verification = Segment(token_ids=ids[50:], start=50, block_table=range(10, 20), num_logits=10)
    assert torch.equal(runner.forward(StepBatch(segments=(verification,))), plain[50:])


@pytest.mark.parametrize("formats", CASES)
def test_the_numbers_of_blocks_do_not_matter(formats: Formats) -> None:
    runner = make_runner(RandomSource(TINY), formats)
    ids = random_ids(150)
    tables = (range(10), range(63, 53, -1), random.Random(3).sample(range(64), 10))
    logits = [run_in_chunks(runner, ids, table, (140, 1)) for table in tables]
    assert all(torch.equal(given, logits[0]) for given in logits)


@pytest.mark.parametrize("formats", CASES)
def test_the_number_of_threads_does_not_matter(formats: Formats) -> None:
    given = []
    for num_threads in (1, 2, 3, 5):
        runner = make_runner(RandomSource(TINY), formats, num_threads=num_threads)
        long, short = random_ids(390, seed=1), random_ids(20, seed=2)
        first = runner.forward(
            StepBatch(segments=(prompt_segment(long, range(25)), prompt_segment(short, range(30, 40))))
        )
        last = Segment(token_ids=(7,), start=390, block_table=range(25))
        given.append(torch.cat((first, runner.forward(StepBatch(segments=(last,))))))
        runner.close()
    assert all(torch.equal(logits, given[0]) for logits in given)


@pytest.mark.parametrize(("block_size", "formats"), [*product((8, 32, 256), CASES[::2])])
def test_the_size_of_blocks_does_not_matter(block_size: int, formats: Formats) -> None:
    ids = random_ids(300)
    usual = run_in_chunks(make_runner(RandomSource(TINY), formats), ids, range(20), (290, 1))
    runner = make_runner(RandomSource(TINY), formats, block_size=block_size)
    assert torch.equal(run_in_chunks(runner, ids, range(40), (290, 1)), usual)


@pytest.mark.parametrize("formats", CASES)
def test_what_an_earlier_owner_left_is_never_seen(formats: Formats) -> None:
    runner = make_runner(RandomSource(TINY), formats, num_blocks=20)
    ids = random_ids(150)
    clean = run_in_chunks(runner, ids, range(10), (140, 1))
    _fill_with_poison(runner, range(20))
    assert torch.equal(run_in_chunks(runner, ids, range(10), (140, 1)), clean)


def _fill_with_poison(runner: NativeRunner, blocks: Sequence[int]) -> None:
    content = runner.cache.read_blocks(blocks)
    assert isinstance(content, tuple)
    for tensor in content:
        tensor.fill_(127 if tensor.dtype == torch.int8 else float("nan"))
    runner.cache.write_blocks(blocks, content)


def test_swapped_blocks_continue_where_they_were() -> None:
    runner = make_runner(RandomSource(TINY), Formats(Precision.INT8, KVPrecision.INT8))
    ids = random_ids(40)
    plain = run_in_chunks(runner, ids, range(3), (39, 1))
    content = runner.cache.read_blocks(range(3))
    runner.cache.clear_blocks(range(3))
    runner.cache.write_blocks((50, 7, 9), content)
    runner.cache.copy_block(7, 8)
    last = Segment(token_ids=ids[39:], start=39, block_table=(50, 8, 9))
    assert torch.equal(runner.forward(StepBatch(segments=(last,)))[0], plain[39])
