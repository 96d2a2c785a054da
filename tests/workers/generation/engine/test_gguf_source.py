from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from tests.workers.generation.engine.tiny_weights import TINY, TensorSource, save_gguf, tensors
from workers.generation.engine.config import ModelConfig, RopeType
from workers.generation.engine.gguf_file import GgufFile
from workers.generation.engine.gguf_source import GgufSource
from workers.generation.engine.rope import inverse_frequencies
from workers.generation.engine.weight_source import WeightSource

QWEN2 = replace(TINY, model_type="qwen2", has_qkv_bias=True, is_tied=True)
QWEN3 = replace(TINY, model_type="qwen3", has_head_norms=True)


def assert_same(found: WeightSource, expected: WeightSource) -> None:
    assert torch.equal(found.embedding()[:], expected.embedding()[:])
    assert torch.equal(found.final_norm(), expected.final_norm())
    head, expected_head = found.head(), expected.head()
    assert (head is None and expected_head is None) or torch.equal(head[:], expected_head[:])  # type: ignore[index]
    for number in range(expected.config.num_layers):
        layer, expected_layer = found.layer(number), expected.layer(number)
        for field in fields(layer):
            ours, theirs = getattr(layer, field.name), getattr(expected_layer, field.name)
            assert (ours is None and theirs is None) or torch.equal(ours, theirs), field.name


@pytest.mark.parametrize("config", [TINY, QWEN2, QWEN3], ids=lambda config: config.model_type)
def test_sizes_and_tensors_are_those_of_the_model_that_was_converted(tmp_path: Path, config: ModelConfig) -> None:
    save_gguf(tmp_path / "model.gguf", tensors(config), config)
    source = GgufSource(GgufFile(tmp_path / "model.gguf"))
    assert source.config == replace(config, norm_eps=source.config.norm_eps)
    assert source.config.norm_eps == pytest.approx(config.norm_eps)
    assert_same(source, TensorSource(tensors(config), config))


def test_window_and_linear_scaling_are_read(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"llama__attention__sliding_window": 12, "llama__rope__scaling__type": "linear"}
    save_gguf(tmp_path / "model.gguf", tensors(), **keys, llama__rope__scaling__factor=4.0)
    config = GgufSource(GgufFile(tmp_path / "model.gguf")).config
    assert config.windows == (12, 12)
    assert (config.rope.rope_type, config.rope.factor) == (RopeType.LINEAR, 4.0)


def test_yarn_is_read_with_the_factor_of_the_paper(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__original_context_length": 16}
    save_gguf(tmp_path / "model.gguf", tensors(), **keys, llama__rope__scaling__factor=4.0)
    rope = GgufSource(GgufFile(tmp_path / "model.gguf")).config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position) == (RopeType.YARN, 4.0, 16)
    assert rope.attention_factor == pytest.approx(1.138629)


def test_frequency_factors_divide_the_frequencies(tmp_path: Path) -> None:
    divisors = torch.tensor([1.0, 1.5, 4.0, 8.0])
    save_gguf(tmp_path / "model.gguf", {**tensors(), "rope_freqs.weight": divisors})
    rope = GgufSource(GgufFile(tmp_path / "model.gguf")).config.rope
    torch.testing.assert_close(inverse_frequencies(rope, 8), inverse_frequencies(TINY.rope, 8) / divisors)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"llama__expert_count": 8}, "llama.expert_count 8"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type 'longrope'"),
        ({"llama__logit_scale": 0.5}, "llama.logit_scale 0.5"),
        ({"llama__attention__key_length": 16}, "llama.rope.dimension_count"),
    ],
)
def test_settings_that_change_numbers_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], reason: str) -> None:
    save_gguf(tmp_path / "model.gguf", tensors(), **keys)
    with pytest.raises(ConfigError, match=reason):
        GgufSource(GgufFile(tmp_path / "model.gguf"))


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    save_gguf(tmp_path / "model.gguf", tensors(), replace(TINY, model_type="gemma"))
    with pytest.raises(ConfigError, match=r"general\.architecture 'gemma'"):
        GgufSource(GgufFile(tmp_path / "model.gguf"))
