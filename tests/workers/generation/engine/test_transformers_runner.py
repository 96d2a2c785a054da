"""Golden comparison with `transformers`' own `generate`, family by family, over mixed steps of the paged cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.generation.engine.greedy import run_greedy
from tests.workers.generation.engine.tiny_models import save_model
from workers.generation.engine.batch import ModelRunner, Segment, StepBatch
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.transformers_model import load_causal_model
from workers.generation.engine.transformers_runner import TransformersRunner

CPU = torch.device("cpu")
PROMPTS = ((5,), (7, 8, 9, 10), tuple(range(20, 57)), (3, 3, 3, 4, 4, 5, 6, 7, 8))
NUM_TOKENS = 20
HIDDEN_IN_TORCH, HIDDEN_IN_KERNELS = 48, 64  # heads of 12 and 16 numbers: the kernels want a multiple of 8
TOLERANCES = {Precision.FP32: 1e-4, Precision.BF16: 2e-1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(
    folder: Path, *, precision: Precision = Precision.FP32, kv: KVPrecision = KVPrecision.FP32, block_size: int = 8
) -> TransformersRunner:
    model = load_causal_model(folder, precision=precision, device=CPU, max_context=100)
    shape = model.cache_shape(num_blocks=320 // block_size, block_size=block_size, precision=kv)
    return TransformersRunner(model, shape, identity="tiny")


def expected(model: Any, prompt: Sequence[int]) -> tuple[int, ...]:
    model.generation_config.eos_token_id = None  # `generate` would end there, or pass over it; the runner does neither
    found = model.generate(torch.tensor([list(prompt)]), max_new_tokens=NUM_TOKENS, do_sample=False)
    return tuple(found[0, len(prompt) :].tolist())


def check_greedy(runner: ModelRunner, model: Any) -> None:
    plain = [expected(model, prompt) for prompt in PROMPTS]
    assert len({tokens for output in plain for tokens in output}) > 10, "an answer of one token would prove little"
    assert run_greedy(runner, PROMPTS, NUM_TOKENS, guides=plain) == plain


@pytest.mark.parametrize("hidden_size", [HIDDEN_IN_TORCH, HIDDEN_IN_KERNELS])
def test_gpt2_answers_as_generate_does_token_for_token(tmp_path: Path, hidden_size: int) -> None:
    model = save_model(tmp_path, "gpt2", hidden_size=hidden_size)
    check_greedy(load(tmp_path), model)


def test_a_chunk_without_logits_gives_none_and_a_step_may_be_repeated(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    runner = load(tmp_path)
    first = StepBatch(segments=(Segment(token_ids=(5, 6, 7), start=0, block_table=(3,), num_logits=0),))
    second = StepBatch(segments=(Segment(token_ids=(8, 9), start=3, block_table=(3,), num_logits=2),))
    assert runner.forward(first).shape == (0, runner.vocab_size)
    logits = runner.forward(second)  # (2, vocab)
    assert torch.equal(runner.forward(second), logits)


def test_blocks_move_with_their_content(tmp_path: Path) -> None:
    save_model(tmp_path, "gpt2")
    runner = load(tmp_path)
    chunk = Segment(token_ids=(5, 6, 7), start=0, block_table=(3,), num_logits=0)
    runner.forward(StepBatch(segments=(chunk,)))

    def after(block: int) -> torch.Tensor:
        return runner.forward(StepBatch(segments=(Segment(token_ids=(8,), start=3, block_table=(block,)),)))

    logits = after(3)  # (1, vocab)
    content = runner.cache.read_blocks((3,))
    runner.cache.copy_block(3, 5)
    runner.cache.clear_blocks((3,))
    assert not torch.allclose(after(3), logits)
    assert torch.equal(after(5), logits)
    runner.cache.write_blocks((0,), content)
    assert torch.equal(after(0), logits)


@pytest.mark.parametrize(("kv", "tolerance"), [(KVPrecision.FP16, 2e-3), (KVPrecision.INT8, 3e-2)])
def test_a_smaller_cache_moves_the_logits_a_little(tmp_path: Path, kv: KVPrecision, tolerance: float) -> None:
    save_model(tmp_path, "gpt2")
    found = []
    for precision in (KVPrecision.FP32, kv):
        runner = load(tmp_path, kv=precision)
        runner.forward(StepBatch(segments=(Segment(token_ids=PROMPTS[2], start=0, block_table=range(5)),)))
        found.append(
            runner.forward(StepBatch(segments=(Segment(token_ids=(9,), start=len(PROMPTS[2]), block_table=range(5)),)))
        )
    distance = float((found[1] - found[0]).norm() / found[0].norm())
    assert 0 < distance < tolerance


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_row_has_the_same_attention_in_torch_and_in_the_kernels(tmp_path: Path, precision: Precision) -> None:
    save_model(tmp_path, "gpt2", hidden_size=HIDDEN_IN_KERNELS)
    batch = StepBatch(segments=(Segment(token_ids=PROMPTS[2], start=0, block_table=range(5), num_logits=9),))
    fast, slow = load(tmp_path, precision=precision), load(tmp_path, precision=precision, block_size=10)
    torch.testing.assert_close(fast.forward(batch), slow.forward(batch), atol=TOLERANCES[precision], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "opt", "gpt_neox", "mixtral", "qwen2_moe", "mistral", "gemma2", "phi"])
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize(("hidden_size", "head_dim"), [(HIDDEN_IN_TORCH, 12), (HIDDEN_IN_KERNELS, 16)])
def test_families_answer_as_generate_does(
    tmp_path: Path, family: str, block_size: int, hidden_size: int, head_dim: int
) -> None:
    width = "word_embed_proj_dim" if family == "opt" else "hidden_size"
    model = save_model(tmp_path, family, **{width: hidden_size, "hidden_size": hidden_size, "head_dim": head_dim})
    check_greedy(load(tmp_path, block_size=block_size), model)
