"""Packing, refusals, and what becomes of threads and memory."""

from __future__ import annotations

import resource
import threading
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from tests.workers.generation.engine.native_reference import (
    MAX_CONTEXT,
    TINY,
    Formats,
    RandomSource,
    changed,
    make_runner,
    native_library,
    prompt_segment,
    random_ids,
)
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.config import ModelConfig
from workers.generation.engine.native_model import SLICE_OUTPUTS, NativeModel
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.quantize import quantize_int8


def segment(
    token_ids: tuple[int, ...] = (1, 2), start: int = 0, blocks: tuple[int, ...] = (0,), logits: int = 1
) -> Segment:
    return Segment(token_ids=token_ids, start=start, block_table=blocks, num_logits=logits)


class Sliced(RandomSource):
    """A source that notes how many rows of the vocabulary are read at once."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.sizes: list[int] = []

    def embedding(self) -> Any:
        return self

    @property
    def shape(self) -> torch.Size:
        return super().embedding().shape

    def __getitem__(self, rows: slice) -> torch.Tensor:
        part = super().embedding()[rows]
        self.sizes.append(len(part))
        return part


def num_threads() -> int:
    """Return the threads of this process, the kernels' own among them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (segment(token_ids=(83,)), "vocabulary"),
        (segment(token_ids=(-1,)), "vocabulary"),
        (segment(start=MAX_CONTEXT - 1, blocks=tuple(range(25))), "context"),
        (segment(start=-1), "context"),
        (segment(blocks=(64,)), "block"),
        (segment(blocks=(-1,)), "block"),
        (segment(start=15), "block table too short"),
        (segment(blocks=()), "block table too short"),
        (segment(logits=3), "logits"),
        (segment(token_ids=(), logits=0), "tokens"),
        (segment(token_ids=(1 << 40,)), "32 bits"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_and_writes_nothing(wrong: Segment, word: str) -> None:
    runner = make_runner(RandomSource(TINY))
    with pytest.raises(ValueError, match=word):
        runner.forward(StepBatch(segments=(segment(blocks=(5,)), wrong)))
    content = runner.cache.read_blocks((5,))
    assert isinstance(content, tuple)
    assert not any(tensor.any() for tensor in content)


def test_a_closed_runner_refuses_and_may_be_closed_again() -> None:
    runner = make_runner(RandomSource(TINY))
    runner.close()
    runner.close()
    with pytest.raises(ValueError, match="closed"):
        runner.forward(StepBatch(segments=(segment(),)))
    assert (runner.weights_bytes, runner.activation_bytes) == (0, 0)


def test_what_the_kernels_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="fp8"):
        NativeModel(native_library(), RandomSource(TINY), precision=Precision.FP8, max_context=16)
    with pytest.raises(ConfigError, match="head_dim"):
        make_runner(RandomSource(changed(head_dim=12)))
    with pytest.raises(ConfigError, match="block_size"):
        make_runner(RandomSource(TINY), block_size=12)


def test_threads_end_with_the_runner_and_memory_is_freed() -> None:
    before = num_threads()
    for _ in range(50):
        runner = make_runner(RandomSource(TINY), num_threads=4)
        assert num_threads() == before + 3
        runner.close()
    assert num_threads() == before


def test_a_forgotten_runner_ends_its_threads() -> None:
    before = num_threads()
    runner = make_runner(RandomSource(TINY), num_threads=3)
    del runner
    assert num_threads() == before


def test_steps_in_a_row_need_no_more_memory() -> None:
    runner = make_runner(RandomSource(TINY))
    batch = StepBatch(segments=(prompt_segment(random_ids(300), range(20)),))
    runner.forward(batch)
    held, peak = runner.activation_bytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(200):
        runner.forward(batch)
    assert runner.activation_bytes == held
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4_096  # KiB; 200 steps' arrays are 100 MiB


def test_models_run_side_by_side() -> None:
    runners = [make_runner(RandomSource(TINY, seed)) for seed in range(3)]
    batch = StepBatch(segments=(prompt_segment(random_ids(60), range(4)),))
    wanted = [runner.forward(batch) for runner in runners]
    given: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        for _ in range(30):
            given[number] = runners[number].forward(batch)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(given[number], wanted[number]) for number in range(3))
    assert not torch.equal(wanted[0], wanted[1])


def test_the_formats_need_as_much_memory_as_they_should() -> None:
    sizes = {}
    config = changed(hidden_size=256, intermediate_size=512, vocab_size=1_024)
    for precision in (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8):
        model = NativeModel(native_library(), RandomSource(config), precision=precision, max_context=16)
        sizes[precision] = model.weights_bytes
    numbers = 256 * (1_024 + config.num_layers * (2 * 4 * 16 + 2 * 2 * 16 + 3 * 512))
    for precision, bytes_each in {
        Precision.FP32: 4.0,
        Precision.BF16: 2.0,
        Precision.FP16: 2.0,
        Precision.INT8: 1 + 4 / 64,
    }.items():
        assert numbers * bytes_each <= sizes[precision] <= numbers * bytes_each + 10_000


def test_layouts_tell_number_formats_and_weights_apart() -> None:
    caches = (KVPrecision.FP32, KVPrecision.FP16)
    names = {make_runner(RandomSource(TINY), Formats(cache=cache)).layout.identity for cache in caches}
    assert len(names) == 2
    assert all("tiny" in name for name in names)


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (1, 1), (37, 150), (20, 63), (15, 65)])
def test_eight_bit_weights_are_those_of_quantize_int8(outputs: int, inputs: int) -> None:
    weight = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(outputs))
    weight[0] = 0
    wanted = quantize_int8(weight)
    num_groups, num_panels = -(-inputs // 64), -(-outputs // 16)
    packed = torch.empty((num_panels, num_groups, 64 + 64 * 16), dtype=torch.int8)
    pack = native_library().function("gea_pack", None, [c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64])
    pack(packed.data_ptr(), 1, 3, weight.data_ptr(), outputs, inputs)
    scales = packed[:, :, :32].contiguous().view(torch.bfloat16).float()  # (panels, groups, 16)
    sums = packed[:, :, 32:64].contiguous().view(torch.int16)  # (panels, groups, 16)
    quads = packed[:, :, 64:].view(num_panels, num_groups, 16, 16, 4)
    values = quads.permute(0, 3, 1, 2, 4).reshape(num_panels * 16, num_groups, 64)
    assert torch.equal(scales.transpose(1, 2).reshape(-1, num_groups)[:outputs], wanted.scales)
    assert torch.equal(values[:outputs].flatten(1), wanted.values)
    assert not values[outputs:].any()
    assert torch.equal(sums.transpose(1, 2).reshape(-1, num_groups), values.sum(-1, dtype=torch.int16))


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.INT8])
def test_a_large_vocabulary_is_read_in_slices(precision: Precision) -> None:
    config, formats = changed(vocab_size=2 * SLICE_OUTPUTS + 5), Formats(weights=precision)
    source = Sliced(config)
    batch = StepBatch(segments=(segment(token_ids=(1, SLICE_OUTPUTS, 2 * SLICE_OUTPUTS + 4)),))
    found = make_runner(source, formats).forward(batch)
    assert source.sizes == [SLICE_OUTPUTS, SLICE_OUTPUTS, 5]
    assert torch.equal(found, make_runner(RandomSource(config), formats).forward(batch))
