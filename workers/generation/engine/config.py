"""What a model folder says of its model, as far as this engine runs it.

Knows `config.json`, not the weights. Families that the engine cannot run exactly are refused by name: a model that
almost fits would write fluent nonsense.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError

FAMILY = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a Llama-family model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_position: int
    is_tied: bool

    @property
    def group_size(self) -> int:
        """Return how many query heads share one key/value head."""
        return self.num_heads // self.num_kv_heads


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json`. Raises ConfigError if it is missing or of a model that the engine cannot run."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_bytes())
        _refuse_unknown(path, raw)
        return _parse(raw)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"generation.model: cannot read {path}: {error!r}") from error


def _parse(raw: dict[str, Any]) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    rope = raw.get("rope_parameters") or {}
    return ModelConfig(
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        max_position=int(raw["max_position_embeddings"]),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _refuse_unknown(path: Path, raw: dict[str, Any]) -> None:
    """Refuse what the forward pass does not have: other families, biases, scaled RoPE, other activations."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    found = {
        "model_type": (raw.get("model_type"), FAMILY),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias", False)), False),
        "mlp_bias": (bool(raw.get("mlp_bias", False)), False),
        "rope_type": (rope_type, "default"),
        "quantization_config": (raw.get("quantization_config"), None),
    }
    for name, (value, wanted) in found.items():
        if value != wanted:
            raise ConfigError(f"generation.model: {path}: {name} {value!r} is not supported, only {wanted!r}")
