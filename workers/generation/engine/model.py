"""The forward pass of the Llama family in plain torch: RMSNorm, RoPE, grouped attention, SwiGLU.

Knows tensors and slots, no requests or text. One call runs the next token of many sequences and a chunk of one prompt
through each weight together. The invariant: a row's result depends on its own slot only, up to the rounding of a matrix
product that has more rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from schemas.errors import ConfigError
from workers.generation.engine.config import ModelConfig
from workers.generation.engine.kv_cache import SlotCache
from workers.generation.engine.rope import rope_table
from workers.generation.engine.weights import read_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """The next token of each running sequence; `positions` are where they stand in their slots."""

    token_ids: tuple[int, ...]
    slots: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Consecutive tokens of one prompt, from position `start`."""

    token_ids: tuple[int, ...]
    slot: int
    start: int


@dataclass(slots=True)
class _Layer:
    qkv: torch.Tensor  # ((num_heads + 2 num_kv_heads) head_dim, hidden)
    out: torch.Tensor  # (hidden, num_heads head_dim)
    gate_up: torch.Tensor  # (2 intermediate, hidden)
    down: torch.Tensor  # (hidden, intermediate)
    attention_norm: torch.Tensor  # (hidden,)
    mlp_norm: torch.Tensor  # (hidden,)


class LlamaModel:
    """Weights of one model on one device."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor], *, max_context: int) -> None:
        self.config = config
        self._embedding = weights["model.embed_tokens.weight"]  # (vocab, hidden)
        self._head = self._embedding if config.is_tied else weights["lm_head.weight"]  # (vocab, hidden)
        self._norm = weights["model.norm.weight"]  # (hidden,)
        self._layers = [_layer(weights, number) for number in range(config.num_layers)]
        self.device = self._embedding.device
        self.dtype = self._embedding.dtype
        self._cos, self._sin = _rope_table(config, max_context, self.device, self.dtype)  # (max_context, head_dim) each

    @classmethod
    def load(
        cls, folder: Path, config: ModelConfig, *, max_context: int, dtype: torch.dtype, device: torch.device
    ) -> LlamaModel:
        """Read, convert and fuse the weights. Raises ConfigError if one is missing."""
        weights = {name: tensor.to(device=device, dtype=dtype) for name, tensor in read_tensors(folder)}
        try:
            return cls(config, weights, max_context=max_context)
        except KeyError as error:
            raise ConfigError(f"generation.model: {folder} has no weight {error}") from error

    @torch.inference_mode()
    def forward(self, cache: SlotCache, decode: DecodeRows | None, prefill: PrefillChunk | None) -> torch.Tensor:
        """Run one step and return the logits `(num_decode + 1 if prefill, vocab)` in fp32.

        The last row is that of the prompt chunk's last token. Keys and values are written to the cache at the tokens'
        positions, so a step that failed half-way may be repeated.
        """
        tokens, places = _inputs(decode, prefill, self.device)  # (N,) int64 each
        num_decode = len(decode.token_ids) if decode else 0
        attention = _Attention(self.config, cache, decode, prefill, self.dtype)
        hidden = F.embedding(tokens, self._embedding)  # (N, hidden)
        cos, sin = self._cos[places].unsqueeze(1), self._sin[places].unsqueeze(1)  # (N, 1, head_dim)
        for number, layer in enumerate(self._layers):
            normed = self._rms_norm(hidden, layer.attention_norm)
            mixed = attention.run(number, F.linear(normed, layer.qkv), cos, sin)  # (N, num_heads head_dim)
            hidden = hidden + F.linear(mixed, layer.out)
            gate, up = F.linear(self._rms_norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        if prefill is not None:
            hidden = torch.cat((hidden[:num_decode], hidden[-1:]))  # (num_decode + 1, hidden)
        return F.linear(self._rms_norm(hidden, self._norm), self._head).float()

    def _rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Zhang and Sennrich 2019; the mean square in fp32."""
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * scaled.to(hidden.dtype)


class _Attention:
    """Attention of one step: masks are made once, then used by every layer."""

    def __init__(
        self,
        config: ModelConfig,
        cache: SlotCache,
        decode: DecodeRows | None,
        prefill: PrefillChunk | None,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._cache = cache
        self._num_decode = len(decode.token_ids) if decode else 0
        device = cache.keys.device
        if decode is not None:
            self._slots = torch.tensor(decode.slots, device=device)
            self._positions = torch.tensor(decode.positions, device=device)
            self._num_slots, self._reach = max(decode.slots) + 1, max(decode.positions) + 1
            self._is_dense = decode.slots == tuple(range(self._num_slots))
            lengths = torch.full((self._num_slots,), self._reach, device=device)  # an idle slot attends to anything
            lengths[self._slots] = self._positions + 1
            visible = torch.arange(self._reach, device=device) < lengths[:, None]  # (num_slots, reach)
            self._decode_mask = _additive(visible, dtype)[:, None, None]  # (num_slots, 1, 1, reach)
        if prefill is not None:
            self._slot, self._start = prefill.slot, prefill.start
            self._end = prefill.start + len(prefill.token_ids)
            rows = torch.arange(prefill.start, self._end, device=device)
            visible = torch.arange(self._end, device=device) <= rows[:, None]  # (chunk, end)
            self._prefill_mask = _additive(visible, dtype).repeat(config.group_size, 1)  # (group chunk, end)

    def run(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return `(N, num_heads head_dim)` for `qkv` `(N, (num_heads + 2 num_kv_heads) head_dim)`."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)  # (N, num_heads + 2 num_kv_heads, head_dim)
        turned = _rotate(heads[:, : config.num_heads + config.num_kv_heads], cos, sin)
        query, key = turned[:, : config.num_heads], turned[:, config.num_heads :]
        value = heads[:, config.num_heads + config.num_kv_heads :]
        keys, values = (
            self._cache.keys[layer],
            self._cache.values[layer],
        )  # (slots, num_kv_heads, max_context, head_dim)
        cut, parts = self._num_decode, []
        if cut:
            keys[self._slots, :, self._positions] = key[:cut]
            values[self._slots, :, self._positions] = value[:cut]
            parts.append(self._decode(query[:cut], keys, values))
        if cut < len(qkv):
            keys[self._slot, :, self._start : self._end] = key[cut:].transpose(0, 1)
            values[self._slot, :, self._start : self._end] = value[cut:].transpose(0, 1)
            parts.append(self._prefill(query[cut:], keys[self._slot], values[self._slot]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend over all used slots at once; the heads of a group stand as its query positions."""
        config = self._config
        grouped = query.view(len(query), config.num_kv_heads, config.group_size, config.head_dim)
        if not self._is_dense:
            spread = grouped.new_zeros((self._num_slots, *grouped.shape[1:]))
            spread[self._slots] = grouped
            grouped = spread
        mixed = F.scaled_dot_product_attention(  # (num_slots, num_kv_heads, group, head_dim)
            grouped,
            keys[: self._num_slots, :, : self._reach],
            values[: self._num_slots, :, : self._reach],
            attn_mask=self._decode_mask,
        )
        if not self._is_dense:
            mixed = mixed[self._slots]
        return mixed.reshape(len(query), -1)

    def _prefill(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Attend from each token of the chunk to all before it, over one slot."""
        config, chunk = self._config, len(query)
        grouped = query.view(chunk, config.num_kv_heads, config.group_size, config.head_dim)
        flat = grouped.permute(1, 2, 0, 3).reshape(
            1, config.num_kv_heads, -1, config.head_dim
        )  # (1, kv, group chunk, d)
        mixed = F.scaled_dot_product_attention(
            flat, keys[None, :, : self._end], values[None, :, : self._end], attn_mask=self._prefill_mask
        )
        split = mixed.view(config.num_kv_heads, config.group_size, chunk, config.head_dim)
        return split.permute(2, 0, 1, 3).reshape(chunk, -1)


def _layer(weights: dict[str, torch.Tensor], number: int) -> _Layer:
    """Fuse the weights that share an input; the parts are dropped, so that memory holds them once."""
    prefix = f"model.layers.{number}."

    def fuse(*names: str) -> torch.Tensor:
        return torch.cat([weights.pop(f"{prefix}{name}.weight") for name in names])

    return _Layer(
        qkv=fuse("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out=fuse("self_attn.o_proj"),
        gate_up=fuse("mlp.gate_proj", "mlp.up_proj"),
        down=fuse("mlp.down_proj"),
        attention_norm=fuse("input_layernorm"),
        mlp_norm=fuse("post_attention_layernorm"),
    )


def _rope_table(
    config: ModelConfig, max_context: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = (torch.cat((half, half), dim=-1) for half in rope_table(config, max_context))
    return cos.to(device, dtype), sin.to(device, dtype)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def _inputs(
    decode: DecodeRows | None, prefill: PrefillChunk | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens: list[int] = []
    places: list[int] = []
    if decode is not None:
        tokens.extend(decode.token_ids)
        places.extend(decode.positions)
    if prefill is not None:
        tokens.extend(prefill.token_ids)
        places.extend(range(prefill.start, prefill.start + len(prefill.token_ids)))
    return torch.tensor(tokens, device=device), torch.tensor(places, device=device)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, float("-inf"))
