"""What a model folder says of its model, as far as this engine runs it by itself.

Knows `config.json` as transformers 4 and 5 write it, not the weights. A model that almost fits would write fluent
nonsense, so the invariant: whatever would change a number and is not in `ModelConfig` is refused by key and value.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

# What transformers takes for keys that a config.json of the family lacks.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2_048},
    "mistral": {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4_096},
    "phi3": {"max_position_embeddings": 4_096},
    "qwen2": {"max_position_embeddings": 32_768, "num_key_value_heads": 32, "sliding_window": 4_096},
    "qwen3": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4_096,
    },
}
SLIDING, FULL = "sliding_attention", "full_attention"


class RopeType(StrEnum):
    """How the rotary frequencies are stretched beyond the context of the training."""

    DEFAULT = "default"
    """Not at all."""
    LINEAR = "linear"
    """All by one factor."""
    DYNAMIC = "dynamic"
    """By the length of the context, beyond max_position only: the same as default, since no context gets longer."""
    LLAMA3 = "llama3"
    """Low frequencies only, with a smooth passage (Llama 3.1)."""
    YARN = "yarn"
    """Low frequencies only, with a ramp and a factor on the scores (Peng et al. 2023)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The settings of rotary positions. `attention_factor` multiplies both tables.

    `divisors` divide the frequencies, one each; empty for none. GGUF files carry llama3's stretching in this form.
    """

    theta: float = 10_000.0
    rope_type: RopeType = RopeType.DEFAULT
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a Llama-family model.

    `windows` has an entry for each layer: a token sees itself and window - 1 tokens before it, all where it is None.
    `has_head_norms`: queries and keys are normed by head before RoPE. The biases are those of query, key and value, of
    the output projection, and of gate, up and down.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    is_tied: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norms: bool = False

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.intermediate_size, self.num_layers, self.num_kv_heads)
        if min(*sizes, self.head_dim, self.max_position) < 1:
            raise ValueError("sizes are positive")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2 or len(self.windows) != self.num_layers:
            raise ValueError(
                "num_key_value_heads divides num_attention_heads, head_dim is even, each layer has a window"
            )

    @property
    def group_size(self) -> int:
        """Return how many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json`. Raises ConfigError if it is missing or of a model that the engine cannot run by itself."""
    raw = read_raw_config(folder)
    if (reason := why_not_native(raw)) is not None:
        raise ConfigError(f"generation.model: {folder / 'config.json'}: {reason}")
    try:
        return _parse(DEFAULTS[raw["model_type"]] | raw)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"generation.model: cannot use {folder / 'config.json'}: {error!r}") from error


def read_raw_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of any model. Raises ConfigError if it is missing, broken or of quantized weights."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"generation.model: cannot read {path}: {error!r}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"generation.model: {path} holds no object")
    quantized = raw.get("quantization_config")
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConfigError(
            f"generation.model: {path}: quantization_config {method!r} is not supported; take its unquantized weights"
            " and let generation.precision quantize them, take a GGUF file, or serve the model by a remote engine"
        )
    return raw


def why_not_native(raw: Mapping[str, Any]) -> str | None:
    """Return what the engine's own models lack for this configuration, by key and value; None where nothing."""
    rope = _raw_rope(raw)
    model_type = raw.get("model_type")
    family = model_type if isinstance(model_type, str) else ""
    has_layer_types = family in ("qwen2", "qwen3")
    layer_types = {SLIDING, FULL} if has_layer_types else {FULL}
    checks: dict[str, tuple[Any, bool]] = {
        "model_type": (model_type, family in DEFAULTS),
        "hidden_act": (raw.get("hidden_act"), raw.get("hidden_act") in (None, "silu", "swish")),
        "rope_type": (
            _rope_type(rope),
            _rope_type(rope) in ({RopeType.DEFAULT} if family == "phi3" else set(RopeType)),
        ),
        "rope_parameters": (rope, not any(isinstance(value, Mapping) for value in rope.values())),
        "partial_rotary_factor": (part := _first(rope, raw, "partial_rotary_factor"), part in (None, 1)),
        "layer_types": (raw.get("layer_types"), set(raw.get("layer_types") or ()) <= layer_types),
        "pretraining_tp": (raw.get("pretraining_tp"), raw.get("pretraining_tp") in (None, 1)),
    }
    for name, (value, is_known) in checks.items():
        if not is_known:
            return f"{name} {value!r} is not supported by the engine's own models"
    return None


def _parse(raw: Mapping[str, Any]) -> ModelConfig:
    family, heads = raw["model_type"], int(raw["num_attention_heads"])
    has_bias = family in ("llama", "qwen3") and bool(raw.get("attention_bias", False))
    return ModelConfig(
        model_type=family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position=int(raw["max_position_embeddings"]),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        rope=_parse_rope(raw),
        windows=_windows(raw),
        has_qkv_bias=has_bias or family == "qwen2",
        has_out_bias=has_bias,
        has_mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        has_head_norms=family == "qwen3",
    )


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window: of all layers (Mistral, Phi), or from a layer on, or told by layer (Qwen)."""
    family, num_layers, window = raw["model_type"], int(raw["num_hidden_layers"]), raw.get("sliding_window")
    if family in ("mistral", "phi3"):
        return (None if window is None else int(window),) * num_layers
    if family == "llama" or not raw.get("use_sliding_window", False) or window is None:
        return (None,) * num_layers
    first = int(raw.get("max_window_layers", 28))
    types = raw.get("layer_types") or [SLIDING if layer >= first else FULL for layer in range(num_layers)]
    return tuple(int(window) if kind == SLIDING else None for kind in types)


def _raw_rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of RoPE: `rope_parameters` of transformers 5, `rope_scaling` before."""
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    return found if isinstance(found, Mapping) else {"rope_type": found}


def _rope_type(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _first(rope: Mapping[str, Any], raw: Mapping[str, Any], name: str) -> Any:
    found = rope.get(name)
    return raw.get(name) if found is None else found


def _parse_rope(raw: Mapping[str, Any]) -> RopeConfig:
    rope = _raw_rope(raw)
    rope_type = RopeType(_rope_type(rope))
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = int(original or raw["max_position_embeddings"])
    factor = 1.0 if rope_type is RopeType.DEFAULT else rope["factor"]
    if factor is None:
        factor = raw["max_position_embeddings"] / original
    return RopeConfig(
        theta=float(_first(rope, raw, "rope_theta") or 10_000.0),
        rope_type=rope_type,
        factor=float(factor),
        original_max_position=original,
        low_freq_factor=float(rope["low_freq_factor"]) if rope_type is RopeType.LLAMA3 else 1.0,
        high_freq_factor=float(rope["high_freq_factor"]) if rope_type is RopeType.LLAMA3 else 4.0,
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
        attention_factor=_attention_factor(rope, float(factor)) if rope_type is RopeType.YARN else 1.0,
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's factor of the scores, split over queries and keys (equation 22, and DeepSeek's variant of it)."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    if over and under:
        return yarn_scale(factor, float(over)) / yarn_scale(factor, float(under))
    return yarn_scale(factor)


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return what YaRN multiplies queries and keys with, for contexts stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
