"""The forward pass of the Llama family in torch: RMSNorm, RoPE, grouped attention, SwiGLU.

Knows tensors, no requests or blocks: attention is handed in, and so are the kinds of matrix products. The invariant: a
row's result depends on its own sequence only, up to the rounding of a matrix product that has more rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from workers.generation.engine.linear import (
    FloatLinear,
    GroupedInt8Linear,
    Linear,
    activation_dtype,
    embed,
    head_factory,
    linear_factory,
)
from workers.generation.engine.protocol import Precision
from workers.generation.engine.rope import rope_table, rotate
from workers.generation.engine.weight_source import LayerWeights, WeightSource

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps a layer, queries `(T, num_heads, head_dim)`, keys and values of the rows to `(T, num_heads * head_dim)`."""
Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums `(T, hidden)` over the ranks of a model that is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: torch.Tensor  # (hidden,)
    mlp_norm: torch.Tensor  # (hidden,)
    query_norm: torch.Tensor | None  # (head_dim,)
    key_norm: torch.Tensor | None  # (head_dim,)


class LlamaModel:
    """Weights of one model, or of one rank's share of it, on one device."""

    def __init__(
        self,
        source: WeightSource,
        *,
        precision: Precision,
        device: torch.device,
        max_context: int,
        reduce: Reduce | None = None,
    ) -> None:
        """Read the weights layer by layer. Raises ConfigError where one is missing or the device lacks a precision."""
        self.config, self.device, self.max_context = source.config, device, max_context
        self.dtype = activation_dtype(precision, device)
        self._make, self._reduce = linear_factory(precision, device), reduce
        self._make_head = head_factory(precision, device)
        self._read_vocabulary(source)
        self._norm = self._place(source.final_norm())
        self._layers = [self._layer(source.layer(number)) for number in range(self.config.num_layers)]
        cos, sin = (table.to(device, self.dtype) for table in rope_table(self.config, max_context))
        self._cos, self._sin = cos[:, None], sin[:, None]  # (max_context, 1, head_dim / 2) each

    @property
    def vocab_size(self) -> int:
        """Return the number of columns of the logits."""
        return self._vocab_size

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of weights and tables; what is tied counts once."""
        products = [part for layer in self._layers for part in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        embedding = 0 if self._is_shared else self._embedding.nbytes if isinstance(self._embedding, torch.Tensor) else 0
        tables = self._cos.nbytes + self._sin.nbytes
        return embedding + tables + self._head.num_bytes + sum(part.num_bytes for part in products)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits `(len(wanted), vocab_size)` fp32 of rows of the batch, of all of them without `wanted`.

        `token_ids` and `positions` `(T,)` are the rows; `attend` writes each layer's keys and values and reads the
        context.
        """
        hidden = embed(self._embedding, token_ids, self.dtype)  # (T, hidden)
        cos, sin = self._cos[positions], self._sin[positions]  # (T, 1, head_dim / 2)
        for number, layer in enumerate(self._layers):
            mixed = self._attention(number, layer, self._rms_norm(hidden, layer.attention_norm), cos, sin, attend)
            hidden = hidden + self._sum(layer.out(mixed))
            gate, up = layer.gate_up(self._rms_norm(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + self._sum(layer.down(F.silu(gate) * up))
        if wanted is not None:
            hidden = hidden[wanted]  # (num_logits, hidden)
        return self._head(self._rms_norm(hidden, self._norm)).float()

    def _attention(
        self, number: int, layer: _Layer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return `(T, num_heads head_dim)`."""
        config = self.config
        heads = layer.qkv(normed).view(len(normed), -1, config.head_dim)  # (T, num_heads + 2 num_kv_heads, head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._rms_norm(query, layer.query_norm), self._rms_norm(key, layer.key_norm)
        return attend(number, rotate(query, cos, sin), rotate(key, cos, sin), value)

    def _rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Zhang and Sennrich 2019; the mean square in fp32."""
        wide = hidden.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return weight * scaled.to(hidden.dtype)

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        return part if self._reduce is None else self._reduce(part)

    # Loading

    def _read_vocabulary(self, source: WeightSource) -> None:
        """Make embedding and output projection; one matrix where they are tied and their forms allow it."""
        weight, head = self._place(source.embedding()[:]), source.head()
        self._head = self._make_head(weight if head is None else self._place(head[:]), None)
        self._vocab_size = len(weight) if head is None else head.shape[0]
        self._is_shared = head is None and isinstance(self._head, FloatLinear | GroupedInt8Linear)
        self._embedding: torch.Tensor | GroupedInt8Linear = weight
        if self._is_shared and isinstance(self._head, GroupedInt8Linear):
            self._embedding = self._head

    def _layer(self, weights: LayerWeights) -> _Layer:
        return _Layer(
            qkv=self._product(weights.qkv, weights.qkv_bias),
            out=self._product(weights.out, weights.out_bias),
            gate_up=self._product(weights.gate_up, weights.gate_up_bias),
            down=self._product(weights.down, weights.down_bias),
            attention_norm=self._place(weights.attention_norm),
            mlp_norm=self._place(weights.mlp_norm),
            query_norm=None if weights.query_norm is None else self._place(weights.query_norm),
            key_norm=None if weights.key_norm is None else self._place(weights.key_norm),
        )

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._make(self._place(weight), None if bias is None else self._place(bias))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype)
