"""Golden comparison with transformers: greedy decoding is equal token for token, alone and in a mixed batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from schemas.errors import ConfigError
from schemas.tokens import FinishReason
from tests.workers.generation.fakes import save_tokenizer
from workers.generation.engine.config import read_config
from workers.generation.engine.loader import _runner
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.model import DecodeRows, PrefillChunk
from workers.generation.engine.protocol import EngineRequest, Finished, Precision, SamplingParams, TokenChunk
from workers.generation.engine.settings import LocalEngineSettings
from workers.generation.engine.weights import weights_hash

PROMPTS = ((5,), (7, 8, 9, 10), tuple(range(20, 60)), (3, 3, 3, 4, 4, 5))
NUM_TOKENS = 24


def save_tiny_model(folder: Path, *, is_tied: bool = True, num_kv_heads: int = 2) -> Any:
    """Write a random Llama with transformers' own config and return transformers' model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        initializer_range=0.4,  # far from ties between logits
        eos_token_id=2,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if is_tied:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    config.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def expected(model: Any, prompt: Sequence[int], repetition_penalty: float, num_tokens: int) -> tuple[int, ...]:
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
            repetition_penalty=repetition_penalty,
        )
    return tuple(found[0, len(prompt) :].tolist())


async def generate(engine: LocalEngine, name: str, prompt: Sequence[int], sampling: SamplingParams) -> tuple[int, ...]:
    token_ids: list[int] = []
    async for event in engine.submit(EngineRequest(request_id=name, prompt=tuple(prompt), sampling=sampling)):
        if isinstance(event, TokenChunk):
            token_ids.extend(event.token_ids)
        else:
            assert isinstance(event, Finished)
    return tuple(token_ids)


def greedy(repetition_penalty: float = 1.0, num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, repetition_penalty=repetition_penalty)


@pytest.mark.parametrize(("is_tied", "num_kv_heads"), [(True, 2), (False, 4), (True, 1)])
async def test_tiny_model_decodes_as_transformers_does_alone_and_together(
    tmp_path: Path, is_tied: bool, num_kv_heads: int
) -> None:
    reference = save_tiny_model(tmp_path, is_tied=is_tied, num_kv_heads=num_kv_heads)
    engine = LocalEngine(
        tmp_path, LocalEngineSettings(max_sequences=3, max_context=128, prefill_chunk=16, device="cpu")
    )
    await engine.start()
    cases = [(prompt, penalty) for prompt in PROMPTS for penalty in (1.0, 1.3)]
    wanted = [expected(reference, prompt, penalty, NUM_TOKENS) for prompt, penalty in cases]
    for (prompt, penalty), tokens in zip(cases, wanted, strict=True):
        assert await generate(engine, "alone", prompt, greedy(penalty)) == tokens
    together = await asyncio.gather(
        *(generate(engine, str(place), *_case(case)) for place, case in enumerate(cases)),
        generate(engine, "warm", PROMPTS[1], SamplingParams(temperature=1.2, seed=1, n=2, max_tokens=30)),
    )
    assert together[:-1] == wanted
    await engine.stop()


def _case(case: tuple[tuple[int, ...], float]) -> tuple[tuple[int, ...], SamplingParams]:
    return case[0], greedy(case[1])


async def test_same_seed_gives_the_same_text_whatever_else_runs(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    engine = LocalEngine(tmp_path, LocalEngineSettings(max_sequences=4, max_context=128, device="cpu"))
    await engine.start()
    warm = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=30)
    alone = await generate(engine, "a", PROMPTS[1], warm)
    others = [generate(engine, f"o{place}", PROMPTS[2], SamplingParams(seed=place)) for place in range(5)]
    among, *_ = await asyncio.gather(generate(engine, "a", PROMPTS[1], warm), *others)
    assert among == alone
    other_seed = SamplingParams(temperature=1.0, top_p=0.95, seed=12, max_tokens=30)
    assert await generate(engine, "a", PROMPTS[1], other_seed) != alone
    await engine.stop()


async def test_choices_of_one_request_are_those_of_their_index(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    engine = LocalEngine(tmp_path, LocalEngineSettings(max_sequences=3, max_context=128, device="cpu"))
    await engine.start()
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=20, n=3)
    found: dict[int, list[int]] = {}
    async for event in engine.submit(EngineRequest(request_id="n", prompt=PROMPTS[2], sampling=params)):
        if isinstance(event, TokenChunk):
            found.setdefault(event.index, []).extend(event.token_ids)
        else:
            assert {end.finish_reason for end in event.choices} <= {FinishReason.LENGTH, FinishReason.STOP}
    single = await generate(engine, "one", PROMPTS[2], SamplingParams(temperature=1.0, seed=4, max_tokens=20))
    assert tuple(found[0]) == single
    assert found[0] != found[1]
    await engine.stop()


async def test_bfloat16_runs_and_is_named_in_the_identity(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    settings = LocalEngineSettings(max_context=128, precision=Precision.BF16, device="cpu")
    engine = LocalEngine(tmp_path, settings)
    await engine.start()
    assert len(await generate(engine, "b", PROMPTS[1], greedy())) <= NUM_TOKENS
    assert engine.identity.precision == "bf16"
    assert engine.identity.max_context == 128
    await engine.stop()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mistral"),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn"}),
    ],
)
def test_other_families_are_refused_by_name(tmp_path: Path, field: str, value: object) -> None:
    save_tiny_model(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ConfigError, match=field if field != "rope_parameters" else "rope_type"):
        read_config(tmp_path)


async def test_missing_weight_is_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    save_file({"model.embed_tokens.weight": torch.zeros(320, 48)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        await LocalEngine(tmp_path, LocalEngineSettings(device="cpu")).start()


@torch.inference_mode()
def test_numbers_that_are_not_finite_do_not_outlive_the_request_that_made_them(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    config = read_config(tmp_path)
    settings = LocalEngineSettings(max_sequences=2, max_context=32)
    runner = _runner(tmp_path, config, settings, torch.device("cpu"), 32)
    prompt = PrefillChunk(token_ids=(7, 8, 9), slot=0, start=0)
    row = DecodeRows(token_ids=(5, 5), slots=(0, 1), positions=(3, 9))  # slot 0 is masked from position 4 to 9
    runner.forward(None, prompt)
    right = runner.forward(row, None)
    runner._cache.values[:, 0, :, 4:] = float("nan")
    assert not torch.isfinite(runner.forward(row, None)[0]).all()
    runner.clear(0)
    runner.forward(None, prompt)
    assert torch.equal(runner.forward(row, None), right)


def test_hash_tells_weights_apart(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    before = weights_hash(tmp_path)
    assert before == weights_hash(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert weights_hash(tmp_path) != before


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_real_weights_decode_as_transformers_does() -> None:
    models = pytest.importorskip("ops.embedded")
    try:
        folder = await asyncio.to_thread(models.language_model_folder)
    except models.MissingPrerequisiteError as error:
        pytest.skip(str(error))
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = LocalEngine(folder, LocalEngineSettings(max_sequences=4, max_context=512, prefill_chunk=32, device="cpu"))
    await engine.start()
    texts = ["The capital of France is", "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n", "你好"]
    cases = [(engine.tokenizer.encode_control(text), penalty) for text in texts for penalty in (1.0, 1.2)]
    wanted = [expected(reference, prompt, penalty, 32) for prompt, penalty in cases]
    assert await generate(engine, "alone", cases[0][0], greedy(1.0, 32)) == wanted[0]
    together = await asyncio.gather(
        *(generate(engine, str(i), prompt, greedy(penalty, 32)) for i, (prompt, penalty) in enumerate(cases))
    )
    assert together == wanted
    await engine.stop()
