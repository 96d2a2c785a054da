"""A BERT encoder in plain torch, loaded from safetensors in well under a second.

Knows tensors, not text. It gives the same hidden states as `transformers.BertModel` (a test compares them), without
the seconds that importing transformers costs. Devlin et al. 2019; the weights keep their published names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from safetensors.torch import load_file
from torch import Tensor, nn

from schemas.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BertShape:
    """The sizes of the network, as `config.json` states them."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read `config.json`. Raises ConfigError if it describes another architecture."""
        config = json.loads(path.read_text(encoding="utf-8"))
        if config.get("model_type") != "bert" or config.get("hidden_act") != "gelu":
            raise ConfigError(f"{path}: a bert model with gelu is needed, this is {config.get('model_type')!r}")
        return cls(**{name: config[name] for name in cls.__slots__})


class Embedding(nn.Module):
    """Word + position + type, normalised."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.position_embeddings = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.token_type_embeddings = nn.Embedding(shape.type_vocab_size, shape.hidden_size)
        self.LayerNorm = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)

    def forward(self, token_ids: Tensor) -> Tensor:
        num_tokens = token_ids.shape[1]
        # One text is one segment: its type is always 0.
        places = self.position_embeddings.weight[:num_tokens] + self.token_type_embeddings.weight[0]  # (T, D)
        hidden: Tensor = self.LayerNorm(self.word_embeddings(token_ids) + places)  # (B, T, D)
        return hidden


class Layer(nn.Module):
    """Self-attention and feed-forward, each with a residual and a norm after it."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.num_heads = shape.num_attention_heads
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.attention_output = nn.Linear(size, size)
        self.attention_norm = nn.LayerNorm(size, eps=shape.layer_norm_eps)
        self.intermediate = nn.Linear(size, shape.intermediate_size)
        self.output = nn.Linear(shape.intermediate_size, size)
        self.output_norm = nn.LayerNorm(size, eps=shape.layer_norm_eps)

    def attend(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Mix the tokens. `mask` is (B, 1, 1, T) bool, True where a token counts; None: all count."""
        q, k, v = (
            linear(hidden).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, D/H)
            for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, H, T, D/H)
        projected: Tensor = self.attention_output(mixed.transpose(1, 2).flatten(-2))  # (B, T, D)
        return projected

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.attention_norm(hidden + self.attend(hidden, mask))
        normed: Tensor = self.output_norm(hidden + self.output(F.gelu(self.intermediate(hidden))))
        return normed


# Our names of a layer's parts -> the published ones.
PUBLISHED = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


class Bert(nn.Module):
    """The encoder stack, without a pooler: token ids (B, T) int64 -> hidden states (B, T, D)."""

    def __init__(self, shape: BertShape) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embedding(shape)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))

    def forward(self, token_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the last hidden states (B, T, D). `mask` is (B, T) bool, True where a token counts."""
        hidden: Tensor = self.embeddings(token_ids)
        attended = None if mask is None else mask[:, None, None, :]  # (B, 1, 1, T)
        for layer in self.layers:
            hidden = layer(hidden, attended)
        return hidden

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Load `config.json` and `model.safetensors` from a folder.

        Raises ConfigError if a file is missing or a weight of the network is not in it.
        """
        for name in ("config.json", "model.safetensors"):
            if not (folder / name).is_file():
                raise ConfigError(f"encoder: {folder / name} is missing")
        # Random weights that are replaced at once: 0.13 s. On the meta device it would be 4 s, for torch's imports.
        model = cls(BertShape.read(folder / "config.json"))
        published = load_file(folder / "model.safetensors", device=device)
        try:
            weights = {name: published[published_name(name)] for name in model.state_dict()}
            model.load_state_dict(weights, assign=True)
        except (KeyError, RuntimeError) as error:
            raise ConfigError(f"encoder: {folder} does not fit its config.json: {error}") from error
        return model.to(device, torch.float32).eval()


def published_name(name: str) -> str:
    """Return the name that published BERT weights give to a weight of ours."""
    if not name.startswith("layers."):
        return name
    _, number, part, kind = name.split(".")
    return f"encoder.layer.{number}.{PUBLISHED[part]}.{kind}"
