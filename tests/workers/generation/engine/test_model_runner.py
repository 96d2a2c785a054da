"""The runner in torch: blocks are copied, cleared, taken out and put back; failures are told; any cut agrees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.workers.generation.engine.tiny_weights import TINY, TensorSource, tensors
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.model import LlamaModel
from workers.generation.engine.model_runner import TorchRunner, memory_errors
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision, Precision

PROMPT = tuple(range(3, 23))
TABLE = (5, 1, 7)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_runner(kv_precision: KVPrecision = KVPrecision.FP32, precision: Precision = Precision.FP32) -> TorchRunner:
    source = TensorSource(tensors(), TINY)
    model = LlamaModel(source, precision=precision, device=torch.device("cpu"), max_context=64)
    shape = CacheShape(num_layers=2, num_kv_heads=2, head_dim=8, num_blocks=12, block_size=8, precision=kv_precision)
    return TorchRunner(model, shape, identity="tiny")


def segment(token_ids: Sequence[int], start: int = 0, table: Sequence[int] = TABLE, num_logits: int = 1) -> Segment:
    return Segment(token_ids=token_ids, start=start, block_table=table, num_logits=num_logits)


def run(runner: TorchRunner, *segments: Segment) -> torch.Tensor:
    return runner.forward(StepBatch(segments=segments))


def test_logits_are_fp32_and_as_many_as_are_wanted() -> None:
    runner = make_runner()
    logits = run(runner, segment(PROMPT, num_logits=3), segment((4, 5), table=(2,), num_logits=0))
    assert (logits.shape, logits.dtype) == ((3, runner.vocab_size), torch.float32)
    assert run(runner, segment((9,), start=20, num_logits=0)).shape == (0, runner.vocab_size)


@pytest.mark.parametrize("kv_precision", [KVPrecision.FP32, KVPrecision.INT8])
@pytest.mark.parametrize("cut", [1, 7, 8, 9, 19])
def test_a_prompt_gives_the_same_however_it_is_cut(cut: int, kv_precision: KVPrecision) -> None:
    runner = make_runner(kv_precision)
    whole = run(runner, segment(PROMPT))
    other = (0, 9, 3)
    run(runner, segment(PROMPT[:cut], table=other, num_logits=0))
    torch.testing.assert_close(run(runner, segment(PROMPT[cut:], start=cut, table=other)), whole, atol=1e-4, rtol=1e-4)


def test_a_step_may_be_repeated() -> None:
    runner = make_runner()
    run(runner, segment(PROMPT[:10], num_logits=0))
    first = run(runner, segment(PROMPT[10:], start=10))
    assert torch.equal(run(runner, segment(PROMPT[10:], start=10)), first)


def test_a_copied_block_serves_a_fork() -> None:
    runner = make_runner()
    run(runner, segment(PROMPT, num_logits=0))
    expected = run(runner, segment((9,), start=20))
    runner.cache.copy_block(TABLE[2], 11)
    fork = (*TABLE[:2], 11)
    run(runner, segment((30,), start=20, table=fork))
    assert torch.equal(run(runner, segment((9,), start=20)), expected)
    assert torch.equal(run(runner, segment((9,), start=20, table=fork)), expected)


@pytest.mark.parametrize("kv_precision", list(KVPrecision)[1:])
def test_blocks_that_were_taken_out_come_back_bit_for_bit(kv_precision: KVPrecision) -> None:
    runner = make_runner(kv_precision)
    run(runner, segment(PROMPT, num_logits=0))
    expected = run(runner, segment((9,), start=20))
    content = runner.cache.read_blocks(TABLE)
    runner.cache.clear_blocks(TABLE)
    assert not torch.equal(run(runner, segment((9,), start=20)), expected)
    elsewhere = (8, 10, 0)
    runner.cache.write_blocks(elsewhere, content)
    assert torch.equal(run(runner, segment((9,), start=20, table=elsewhere)), expected)


def test_numbers_that_are_not_finite_do_not_outlive_a_clear() -> None:
    runner = make_runner()
    run(runner, segment(PROMPT, num_logits=0))
    expected = run(runner, segment((9,), start=20))
    runner.cache.values[:, TABLE[2]] = float("nan")
    assert not torch.isfinite(run(runner, segment((9,), start=20))).all()
    runner.cache.clear_blocks([TABLE[2]])
    run(runner, segment(PROMPT[16:], start=16, num_logits=0))
    torch.testing.assert_close(run(runner, segment((9,), start=20)), expected)


def test_memory_is_told_in_parts() -> None:
    numbers = sum(tensor.numel() for name, tensor in tensors().items() if "norm" not in name)
    table = 2 * 64 * 4
    assert make_runner().weights_bytes == 4 * (numbers + table)
    assert make_runner(precision=Precision.BF16).weights_bytes == 2 * (numbers + table)
    int8 = make_runner(precision=Precision.INT8).weights_bytes
    assert int8 < 4 * (numbers + table) * 0.6  # the 32 inputs fill half of a group, which is stored as a whole
    runner = make_runner()
    assert runner.activation_bytes == 0
    run(runner, segment(PROMPT[:4]))
    narrow = runner.activation_bytes
    run(runner, segment(PROMPT))
    assert runner.activation_bytes > narrow > 0
    assert runner.allocator_slack_bytes() == 0


def test_an_allocator_that_gives_up_is_out_of_memory() -> None:
    with pytest.raises(MemoryError), memory_errors():
        torch.empty(1 << 60)
    with pytest.raises(RuntimeError, match="shape"), memory_errors():
        torch.zeros(3).view(2, 2)


def test_close_frees_and_may_be_repeated() -> None:
    runner = make_runner()
    runner.close()
    runner.close()
    assert runner.weights_bytes == 0
