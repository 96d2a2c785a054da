"""A Llama-family model out of a GGUF file: its configuration, and its tensors by the names of transformers.

Knows the names and conventions of llama.cpp. The invariant: an architecture, or a setting that changes a number, is
refused by name where it is not known here.
"""

from __future__ import annotations

from typing import Any

import torch

from schemas.errors import ConfigError
from workers.generation.engine.config import ModelConfig, RopeConfig, RopeType, yarn_scale
from workers.generation.engine.gguf_file import GgufFile
from workers.generation.engine.weights import NamedSource, Shape

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files are of the first
PERMUTED = "llama"  # whose converter turns the rotary halves of a head into pairs
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
DIVISORS = "rope_freqs.weight"
UNKNOWN = ("expert_count", "logit_scale", "rope.scaling.yarn_log_multiplier", "attention.scale", "residual_scale")
"""Settings of an architecture that change numbers, and that no model of the family has."""


class GgufSource(NamedSource):
    """A `WeightSource` over a GGUF file."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(read_gguf_config(file))
        self._file = file
        self._is_permuted = file.metadata["general.architecture"] == PERMUTED

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor, None if there is none of that name."""
        found = self._file.tensors.get(gguf_name(name))
        return None if found is None else found.shape

    def read(self, names: tuple[str, ...]) -> torch.Tensor:
        """Read tensors on top of each other, in the half-split order of rotary pairs."""
        parts = [self._in_halves(name, self._file.read(gguf_name(name))) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _in_halves(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo the permutation of llama.cpp's converter: pairs next to each other become halves."""
        num_heads = self.config.num_heads if ".q_proj." in name else self.config.num_kv_heads
        if not self._is_permuted or (".q_proj." not in name and ".k_proj." not in name):
            return tensor
        pairs = tensor.view(num_heads, self.config.head_dim // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(tensor.shape)


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        number, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{NAMES.get(part, part)}.{kind}"
    return f"{NAMES.get(stem, stem)}.{kind}"


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Return the sizes of a model. Raises ConfigError by key and value for one that the engine cannot run."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"generation.model: {file.path}: general.architecture {architecture!r} is not supported,"
            f" only {', '.join(ARCHITECTURES)}"
        )
    try:
        return _parse(file, architecture)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"generation.model: cannot use {file.path}: {error!r}") from error


def _parse(file: GgufFile, architecture: str) -> ModelConfig:
    def find(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{architecture}.{key}", default)

    def need(key: str) -> int:
        return int(file.metadata[f"{architecture}.{key}"])

    for key in UNKNOWN:
        if find(key):
            raise ConfigError(f"generation.model: {file.path}: {architecture}.{key} {find(key)!r} is not supported")
    heads, layers, window = need("attention.head_count"), need("block_count"), find("attention.sliding_window")
    head_dim = int(find("attention.key_length") or need("embedding_length") // heads)
    if int(find("rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError(f"generation.model: {file.path}: {architecture}.rope.dimension_count is not the head's size")
    return ModelConfig(
        model_type=architecture,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=need("embedding_length"),
        intermediate_size=need("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(find("attention.head_count_kv", heads)),
        head_dim=head_dim,
        norm_eps=float(file.metadata[f"{architecture}.attention.layer_norm_rms_epsilon"]),
        max_position=need("context_length"),
        is_tied="output.weight" not in file.tensors,
        rope=_rope(file, architecture),
        windows=(int(window) if window else None,) * layers,
        has_qkv_bias="blk.0.attn_q.bias" in file.tensors,
        has_out_bias="blk.0.attn_output.bias" in file.tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        has_head_norms="blk.0.attn_q_norm.weight" in file.tensors,
    )


def _rope(file: GgufFile, architecture: str) -> RopeConfig:
    """Return the settings of RoPE. The score factor of YaRN is not in the file: llama.cpp computes it as the paper."""

    def find(key: str, default: Any) -> Any:
        return file.metadata.get(f"{architecture}.rope.{key}", default)

    kind = find("scaling.type", "none")
    factor = float(find("scaling.factor", find("scale_linear", 1.0)))
    known = {"none": RopeType.DEFAULT, "linear": RopeType.LINEAR, "yarn": RopeType.YARN}
    if kind not in known:
        raise ConfigError(f"generation.model: {file.path}: {architecture}.rope.scaling.type {kind!r} is not supported")
    rope_type = RopeType.LINEAR if kind == "none" and factor != 1 else known[kind]
    is_yarn = rope_type is RopeType.YARN
    divisors = tuple(file.read(DIVISORS).tolist()) if DIVISORS in file.tensors else ()
    if divisors and rope_type is not RopeType.DEFAULT:
        raise ConfigError(f"generation.model: {file.path}: {DIVISORS} together with rope.scaling.type {kind!r}")
    return RopeConfig(
        theta=float(find("freq_base", 10_000.0)),
        rope_type=rope_type,
        factor=factor,
        original_max_position=int(
            find("scaling.original_context_length", file.metadata[f"{architecture}.context_length"])
        ),
        beta_fast=float(find("scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(find("scaling.yarn_beta_slow", 1.0)),
        attention_factor=yarn_scale(factor) * float(find("scaling.attn_factor", 1.0)) if is_yarn else 1.0,
        divisors=divisors,
    )
