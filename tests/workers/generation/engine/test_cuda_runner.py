from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.generation.engine.cuda_model import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    answers,
    on_cpu,
    reference,
    run_and_keep,
)
from tests.workers.generation.engine.kernels.paged_cases import naive_attention
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.cuda_graph import Recorder
from workers.generation.engine.cuda_runner import CudaRunner, split_size
from workers.generation.engine.protocol import KVPrecision

PROMPT = Segment(token_ids=tuple(range(1, 31)), start=0, block_table=(3, 9))
DECODE = Segment(token_ids=(31,), start=30, block_table=(3, 9))
CHUNK = Segment(token_ids=tuple(range(40, 60)), start=0, block_table=(5, 6), num_logits=1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("recorder", [None, run_and_keep])
@pytest.mark.parametrize(("chunk", "is_drafted"), [(20, False), (7, True)])
def test_answers_equal_the_reference_token_for_token(recorder: Recorder | None, chunk: int, is_drafted: bool) -> None:
    wanted = answers(reference(), chunk=chunk)
    assert answers(on_cpu(naive_attention, recorder), chunk=chunk, is_drafted=is_drafted) == wanted


def test_answers_equal_the_reference_without_a_kernel() -> None:
    runner = on_cpu(None, run_and_keep)
    assert answers(runner) == answers(reference())
    assert runner.graph_sizes == () and not runner.is_attention_fused


def test_answers_over_8_bit_cache_equal_the_reference() -> None:
    runner = on_cpu(naive_attention, run_and_keep, KVPrecision.INT8)
    assert answers(runner) == answers(reference(KVPrecision.INT8))


def test_logits_stand_in_the_order_of_the_segments() -> None:
    runner, plain = on_cpu(naive_attention, None), reference()
    for one in (runner, plain):
        one.forward(StepBatch(segments=(PROMPT,)))
    mixed = StepBatch(segments=(CHUNK, DECODE))  # the decode's row is run first
    torch.testing.assert_close(runner.forward(mixed), plain.forward(mixed), atol=1e-4, rtol=1e-4)


def test_replayed_decode_equals_the_step_as_it_is() -> None:
    recorded, plain = on_cpu(naive_attention, run_and_keep), on_cpu(naive_attention, None)
    for segment in (PROMPT, DECODE):
        batch = StepBatch(segments=(segment,))
        torch.testing.assert_close(recorded.forward(batch), plain.forward(batch), atol=1e-5, rtol=1e-5)
    assert recorded.graph_sizes == (1, 2, 4, 8, 16, 24)


def test_steps_write_no_other_block_that_a_sequence_could_have() -> None:
    runner = on_cpu(naive_attention, run_and_keep)
    assert runner.layout.num_blocks == NUM_BLOCKS
    runner.forward(StepBatch(segments=(PROMPT,)))
    runner.forward(StepBatch(segments=(DECODE,)))
    others = [block for block in range(NUM_BLOCKS) if block not in DECODE.block_table]
    assert all(not part.any() for part in runner.cache.read_blocks(others))


def test_blocks_are_copied_swapped_and_cleared() -> None:
    runner = on_cpu(naive_attention, None)
    runner.forward(StepBatch(segments=(PROMPT,)))
    runner.cache.copy_block(9, 1)
    content = runner.cache.read_blocks([9, 1])
    assert all(torch.equal(part[:, 0], part[:, 1]) and bool(part.any()) for part in content)
    runner.cache.write_blocks([20, 21], content)
    runner.cache.clear_blocks([9])
    after = runner.cache.read_blocks([20, 1, 9])
    assert all(torch.equal(part[:, 0], part[:, 1]) and not part[:, 2].any() for part in after)


def test_step_that_runs_out_of_memory_may_be_repeated() -> None:
    is_failing = False

    def attend(*given: torch.Tensor, **settings: Any) -> torch.Tensor:
        if is_failing:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
        return naive_attention(*given, **settings)

    runner, plain = on_cpu(attend, None), reference()
    batch = StepBatch(segments=(Segment(token_ids=(1, 2, 3), start=0, block_table=(4,), num_logits=3),))
    is_failing = True
    with pytest.raises(torch.OutOfMemoryError):
        runner.forward(batch)
    is_failing = False
    torch.testing.assert_close(runner.forward(batch), plain.forward(batch), atol=1e-4, rtol=1e-4)


def test_numbers_of_another_sequence_that_are_not_finite_reach_no_row() -> None:
    runner, plain = on_cpu(naive_attention, run_and_keep), reference()
    broken = tuple(torch.full_like(part, float("nan")) for part in runner.cache.read_blocks([0]))
    for one in (runner, plain):
        one.forward(StepBatch(segments=(PROMPT,)))
    runner.cache.write_blocks([0], broken)
    decodes = StepBatch(segments=(DECODE, Segment(token_ids=(2,), start=0, block_table=(7,))))
    torch.testing.assert_close(runner.forward(decodes), plain.forward(decodes), atol=1e-4, rtol=1e-4)


def test_close_frees_everything_once() -> None:
    runner = on_cpu(naive_attention, run_and_keep)
    assert runner.weights_bytes > 0
    runner.forward(StepBatch(segments=(PROMPT,)))
    assert runner.activation_bytes > 0
    runner.close()
    runner.close()
    assert runner.weights_bytes == 0
    assert runner.allocator_slack_bytes() == 0
    assert isinstance(runner, CudaRunner) and runner.layout.block_size == BLOCK_SIZE


@given(st.integers(1, 1 << 20))
def test_few_splits_make_any_context(max_context: int) -> None:
    split = split_size(max_context)
    assert split >= 256 and split % 64 == 0
    assert -(-max_context // split) <= 16
    assert split == 256 or max_context > 8 * split  # not larger than it must be
