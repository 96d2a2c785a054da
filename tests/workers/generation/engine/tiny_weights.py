"""Random weights of a tiny model by the names of transformers, as safetensors or GGUF, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from workers.generation.engine.config import ModelConfig, RopeConfig
from workers.generation.engine.gguf_source import gguf_name
from workers.generation.engine.weights import NamedSource

TINY = ModelConfig(
    model_type="llama",
    vocab_size=48,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    norm_eps=1e-5,
    max_position=64,
    is_tied=False,
    rope=RopeConfig(original_max_position=64),
    windows=(None, None),
)
RAW = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


class TensorSource(NamedSource):
    def __init__(self, weights: Mapping[str, torch.Tensor], config: ModelConfig) -> None:
        super().__init__(config)
        self._weights = weights

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._weights.get(name)
        return None if found is None else tuple(found.shape)

    def read(self, names: tuple[str, ...]) -> torch.Tensor:
        return torch.cat([self._weights[name] for name in names])


def shapes(config: ModelConfig = TINY) -> dict[str, tuple[int, ...]]:
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head, config.num_kv_heads * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.is_tied:
        found["lm_head.weight"] = (config.vocab_size, hidden)
    for number in range(config.num_layers):
        prefix = f"model.layers.{number}."
        sizes = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (key, hidden)}
        sizes |= {"self_attn.v_proj": (key, hidden), "self_attn.o_proj": (hidden, query)}
        sizes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        found |= {f"{prefix}{name}.weight": size for name, size in sizes.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {f"{prefix}{name}.weight": (hidden,) for name in norms}
        if config.has_qkv_bias:
            found |= {f"{prefix}self_attn.{name}_proj.bias": (sizes[f"self_attn.{name}_proj"][0],) for name in "qkv"}
        if config.has_head_norms:
            found |= {f"{prefix}self_attn.{name}_norm.weight": (head,) for name in "qk"}
    return found


def tensors(config: ModelConfig = TINY) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes(config).items()}


def save_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**RAW, **changes}))


def save_gguf(path: Path, weights: Mapping[str, torch.Tensor], config: ModelConfig = TINY, **metadata: Any) -> None:
    """Write a GGUF file as llama.cpp's converter does; `metadata` are further keys, with `__` for a dot."""
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    for key, value in metadata.items():
        _add(writer, key.replace("__", "."), value)
    for name, weight in weights.items():
        writer.add_tensor(gguf_name(name), _paired(name, weight, config).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


def _paired(name: str, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Put rotary halves next to each other, as `LlamaModel.permute` of convert_hf_to_gguf.py does."""
    if config.model_type != "llama" or not (".q_proj." in name or ".k_proj." in name):
        return weight
    heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    halves = weight.numpy().reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return torch.from_numpy(np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape)))
