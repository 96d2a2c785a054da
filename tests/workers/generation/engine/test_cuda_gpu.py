"""The whole runner on a CUDA device: `pytest -m gpu` runs these, and the tests of kernel, products and memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.workers.generation.engine.cuda_model import (
    NUM_BLOCKS,
    answers,
    model,
    on_cuda,
    reference,
    shape,
)
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.cuda_device import FP8_CAPABILITY
from workers.generation.engine.cuda_runner import CudaRunner
from workers.generation.engine.model_runner import TorchRunner
from workers.generation.engine.protocol import KVPrecision, Precision

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY
PROMPT = Segment(token_ids=tuple(range(1, 31)), start=0, block_table=(3, 9))
DECODE = Segment(token_ids=(31,), start=30, block_table=(3, 9))
OTHER = Segment(token_ids=(5,), start=0, block_table=(7,))


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    """fp32 is compared with the CPU: no TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def logits(runner: CudaRunner | TorchRunner) -> torch.Tensor:
    """Return the logits `(3, vocab_size)` of a prompt's end, and of two decodes after it."""
    first = runner.forward(StepBatch(segments=(PROMPT,)))
    return torch.cat((first, runner.forward(StepBatch(segments=(DECODE, OTHER)))))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest error of a row of logits, over the size of the row."""
    assert bool(torch.isfinite(found).all())
    return float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize(("chunk", "is_drafted"), [(20, False), (7, True)])
def test_fp32_answers_equal_the_cpu_token_for_token(has_graphs: bool, chunk: int, is_drafted: bool) -> None:
    runner = on_cuda(has_graphs=has_graphs)
    assert runner.is_attention_fused
    assert bool(runner.graph_sizes) is has_graphs
    assert answers(runner, chunk=chunk, is_drafted=is_drafted) == answers(reference(), chunk=chunk)


def test_fp32_answers_of_the_plain_runner_equal_the_cpu_token_for_token() -> None:
    runner = TorchRunner(model(device=torch.device("cuda")), shape(), identity="tiny")
    assert answers(runner) == answers(reference())


def test_fp32_answers_over_8_bit_cache_equal_the_cpu_token_for_token() -> None:
    assert answers(on_cuda(kv_precision=KVPrecision.INT8)) == answers(reference(KVPrecision.INT8))


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize(
    ("precision", "kv_precision", "within"),
    [
        (Precision.FP32, KVPrecision.FP32, 1e-4),
        (Precision.BF16, KVPrecision.BF16, 0.1),
        (Precision.FP16, KVPrecision.FP16, 0.01),
        (Precision.FP16, KVPrecision.INT8, 0.05),
        (Precision.INT8, KVPrecision.FP16, 0.1),
        pytest.param(
            Precision.FP8,
            KVPrecision.FP16,
            0.35,
            marks=pytest.mark.skipif(not HAS_FP8, reason="the device has no 8-bit floats"),
        ),
    ],
)
def test_logits_are_near_those_of_fp32(
    precision: Precision, kv_precision: KVPrecision, within: float, has_graphs: bool
) -> None:
    assert distance(logits(on_cuda(precision, kv_precision, has_graphs=has_graphs)), logits(reference())) < within


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.INT8])
def test_replayed_steps_equal_steps_as_they_are(precision: Precision) -> None:
    recorded, plain = on_cuda(precision), on_cuda(precision, has_graphs=False)
    within = 1e-5 if precision is Precision.FP32 else 2e-2  # a product of more rows rounds differently
    assert distance(logits(recorded), logits(plain)) < within


def test_replays_write_no_other_block_that_a_sequence_could_have() -> None:
    runner = on_cuda()
    logits(runner)
    others = [block for block in range(NUM_BLOCKS) if block not in (*DECODE.block_table, *OTHER.block_table)]
    assert all(not part.any() for part in runner.cache.read_blocks(others))


def test_graphs_read_blocks_that_were_swapped_in_after_they_were_recorded() -> None:
    runner = on_cuda()
    whole = logits(runner)
    content = runner.cache.read_blocks([3, 9])
    runner.cache.clear_blocks([3, 9, 7])
    runner.cache.write_blocks([20, 11], content)
    moved = Segment(token_ids=DECODE.token_ids, start=DECODE.start, block_table=(20, 11))
    assert torch.equal(runner.forward(StepBatch(segments=(moved, OTHER))), whole[1:])


def test_graphs_take_little_memory_and_close_gives_weights_and_cache_back() -> None:
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(device)
    runner = on_cuda()
    logits(runner)
    assert torch.cuda.memory_reserved(device) - before < 512 << 20  # workspaces of libraries are most of it
    assert runner.allocator_slack_bytes() >= 0
    held = runner.weights_bytes + runner.layout.num_blocks * runner.layout.bytes_per_block
    allocated = torch.cuda.memory_allocated(device)
    runner.close()
    assert allocated - torch.cuda.memory_allocated(device) >= held
