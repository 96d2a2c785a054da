from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from tests.workers.generation.engine.tiny_weights import RAW, save_config
from workers.generation.engine.config import ModelConfig, RopeConfig, RopeType, read_config, why_not_native

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def read(folder: Path, **changes: Any) -> ModelConfig:
    save_config(folder, **changes)
    return read_config(folder)


def test_sizes_are_read_and_what_is_missing_is_what_transformers_takes(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.head_dim, config.num_kv_heads, config.group_size, config.is_tied) == (8, 2, 2, False)
    assert config.rope == RopeConfig(original_max_position=64)
    assert config.windows == (None, None)
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 4
    assert read(tmp_path, head_dim=16).head_dim == 16
    assert read(tmp_path, model_type="qwen3").head_dim == 128


@pytest.mark.parametrize(
    ("family", "changes", "biases", "has_norms"),
    [
        ("llama", {}, (False, False, False), False),
        ("llama", {"attention_bias": True}, (True, True, False), False),
        ("llama", {"mlp_bias": True}, (False, False, True), False),
        ("mistral", {}, (False, False, False), False),
        ("qwen2", {}, (True, False, False), False),
        ("qwen3", {}, (False, False, False), True),
        ("qwen3", {"attention_bias": True}, (True, True, False), True),
    ],
)
def test_biases_and_norms_are_those_of_the_family(
    tmp_path: Path, family: str, changes: dict[str, Any], biases: tuple[bool, bool, bool], has_norms: bool
) -> None:
    config = read(tmp_path, model_type=family, **changes)
    assert (config.has_qkv_bias, config.has_out_bias, config.has_mlp_bias) == biases
    assert config.has_head_norms is has_norms


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {}, (4_096, 4_096)),
        ("mistral", {"sliding_window": 9}, (9, 9)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("llama", {"sliding_window": 9}, (None, None)),
        ("qwen2", {"sliding_window": 9}, (None, None)),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True}, (None, None)),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, (None, 9)),
        (
            "qwen3",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (9, None),
        ),
        ("phi3", {"sliding_window": 9}, (9, 9)),
    ],
)
def test_windows_are_those_of_the_family(
    tmp_path: Path, family: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(tmp_path, model_type=family, **changes).windows == windows


def test_rope_is_read_in_the_form_of_transformers_4_and_5(tmp_path: Path) -> None:
    new = read(tmp_path, rope_parameters={"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3})
    old = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3})
    assert new.rope == old.rope
    assert (new.rope.theta, new.rope.factor, new.rope.original_max_position) == (5e5, 8.0, 16)
    assert new.rope.rope_type is RopeType.LLAMA3


def test_attention_factor_of_yarn_is_that_of_the_paper_or_what_is_said(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert read(tmp_path, rope_parameters=yarn).rope.attention_factor == pytest.approx(1.138629)
    assert read(tmp_path, rope_parameters={**yarn, "attention_factor": 0.5}).rope.attention_factor == 0.5
    both = {**yarn, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert read(tmp_path, rope_parameters=both).rope.attention_factor == 1.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
        ({"model_type": "mistral", "layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
    ],
)
def test_what_the_own_models_lack_is_refused_by_key_and_value(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    assert reason in str(why_not_native({**RAW, **changes}))
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, **changes)


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_quantized_checkpoints_are_refused_by_method_with_advice(tmp_path: Path, method: str) -> None:
    with pytest.raises(ConfigError, match=f"'{method}'.*remote engine"):
        read(tmp_path, quantization_config={"quant_method": method, "bits": 4})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3},
        {"hidden_size": 0},
        {"vocab_size": "many"},
        {"head_dim": 7},
        {"rope_parameters": {"rope_type": "linear"}},
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["sliding_attention"]},
    ],
)
def test_sizes_that_contradict_each_other_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read(tmp_path, **changes)


@pytest.mark.parametrize("content", ["", "[]", "{", json.dumps({"model_type": "llama"})])
def test_broken_configurations_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
    with pytest.raises(ConfigError, match="nowhere"):
        read_config(tmp_path / "nowhere")
