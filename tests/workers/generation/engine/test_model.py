"""Golden comparison with transformers: logits of tiny random models, whole and in pieces over shuffled blocks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.workers.generation.engine.greedy import run_greedy
from tests.workers.generation.fakes import save_tokenizer
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.config import read_config
from workers.generation.engine.model import LlamaModel
from workers.generation.engine.model_runner import TorchRunner
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.weights import SafetensorsSource

SIZES = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,  # far from ties between logits
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("mistral", {"sliding_window": 9}),
    ("qwen3", {"head_dim": 16}),
    ("llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 16}),
    ("llama", {"rope_parameters": {"rope_theta": 5_000.0, "rope_type": "linear", "factor": 4.0}}),
    ("llama", {"rope_parameters": {"rope_theta": 5_000.0, "rope_type": "dynamic", "factor": 4.0}}),
    ("llama", {"rope_parameters": {"rope_theta": 5_000.0, "rope_type": "llama3", **LLAMA3}}),
    ("llama", {"rope_parameters": {"rope_theta": 5_000.0, "rope_type": "yarn", **YARN}}),
    ("mistral", {"sliding_window": None}),
    ("phi3", {"sliding_window": 20}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5}),
]
NUM_BLOCKS, BLOCK_SIZE, LENGTH = 40, 8, 70
CUTS = ((0, 3, 4, 40, 42, 43, LENGTH), (0, 20, 25, 26, 27, 60, LENGTH))  # chunks, decodes and drafts beside each other


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(family: str, **settings: Any) -> Any:
    """Return a random model of transformers whose norms and biases do something."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **settings})).eval()
    for name, weight in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.3)
    return model


def save(folder: Path, model: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    model.config.save_pretrained(folder)


def save_tiny_model(folder: Path, *, is_tied: bool = True, num_kv_heads: int = 2) -> Any:
    """Write a random Llama with a tokenizer, and return transformers' model."""
    sizes = {"vocab_size": 320, "eos_token_id": 2, "pad_token_id": 2}
    model = make_model("llama", tie_word_embeddings=is_tied, num_key_value_heads=num_kv_heads, **sizes)
    save(folder, model)
    save_tokenizer(folder)
    return model


def make_runner(folder: Path, precision: Precision = Precision.FP32) -> TorchRunner:
    config = read_config(folder)
    source = SafetensorsSource(folder, config)
    model = LlamaModel(source, precision=precision, device=torch.device("cpu"), max_context=256)
    shape = CacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        precision=KVPrecision.FP32,
    )
    return TorchRunner(model, shape, identity="tiny")


def run_pieces(runner: TorchRunner, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Run prompts piece by piece beside each other and return the logits `(LENGTH, vocab)` of each."""
    blocks = list(range(NUM_BLOCKS))
    random.Random(5).shuffle(blocks)
    tables, steps = (blocks[:9], blocks[9:18]), []
    for number in range(len(CUTS[0]) - 1):
        segments = [
            Segment(
                token_ids=prompt[cuts[number] : cuts[number + 1]],
                start=cuts[number],
                block_table=table,
                num_logits=cuts[number + 1] - cuts[number],
            )
            for prompt, cuts, table in zip(prompts, CUTS, tables, strict=True)
        ]
        logits = runner.forward(StepBatch(segments=tuple(segments)))
        steps.append(torch.split(logits, [segment.num_logits for segment in segments]))
    return [torch.cat(parts) for parts in zip(*steps, strict=True)]


@pytest.mark.parametrize(("family", "settings"), CASES)
def test_logits_are_those_of_transformers_whole_and_in_pieces(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    reference = make_model(family, **settings)
    save(tmp_path, reference)
    prompts = torch.randint(128, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = reference(prompts).logits  # (2, LENGTH, vocab)
    runner = make_runner(tmp_path)
    whole = Segment(token_ids=prompts[0].tolist(), start=0, block_table=tuple(range(9)), num_logits=LENGTH)
    torch.testing.assert_close(runner.forward(StepBatch(segments=(whole,))), expected[0], atol=1e-4, rtol=1e-4)
    for found, wanted in zip(run_pieces(runner, prompts.tolist()), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("family", "settings"), [CASES[1]])
def test_greedy_tokens_are_those_of_transformers_with_chunks_and_drafts(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    reference = make_model(family, **settings)
    save(tmp_path, reference)
    prompts = [(5,), (7, 8, 9, 10), tuple(range(20, 60))]
    wanted = [greedy(reference, prompt, 16) for prompt in prompts]
    assert run_greedy(make_runner(tmp_path), prompts, 16) == wanted
    assert run_greedy(make_runner(tmp_path), prompts, 16, guides=wanted) == wanted


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize(
    ("precision", "tolerance"), [(Precision.BF16, 0.1), (Precision.FP16, 0.01), (Precision.INT8, 0.15)]
)
def test_other_precisions_stay_near_fp32(tmp_path: Path, precision: Precision, tolerance: float) -> None:
    reference = save_tiny_model(tmp_path)
    prompt = list(range(3, 40))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    runner = make_runner(tmp_path, precision)
    batch = StepBatch(segments=(Segment(token_ids=prompt, start=0, block_table=range(5), num_logits=len(prompt)),))
    found = runner.forward(batch)
    assert 0 < float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.model
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_real_weights_decode_as_transformers_does() -> None:
    models = pytest.importorskip("ops.embedded")
    try:
        folder = models.language_model_folder()
    except models.MissingPrerequisiteError as error:
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [(504, 3575, 282, 4649, 314), (1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 34, 47, 2)]
    assert run_greedy(make_runner(folder), prompts, 32) == [greedy(reference, prompt, 32) for prompt in prompts]
