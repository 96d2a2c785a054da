"""What a model file must give to a model of the Llama family: its tensors, layer by layer.

Read one layer at a time and drop it when it is packed, and the vocabulary's matrices in slices, so that a load never
holds the weights twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from workers.generation.engine.config import ModelConfig


@dataclass(slots=True, kw_only=True)
class LayerWeights:
    """The tensors of one decoder layer, in the number format of the file. What a model does not have is None.

    `qkv` `((num_heads + 2 num_kv_heads) head_dim, hidden)` is query, key and value on top of each other, `gate_up`
    `(2 intermediate, hidden)` gate and up; `out` `(hidden, num_heads head_dim)`, `down` `(hidden, intermediate)`.
    Rotary halves stand in the half-split order of transformers. `query_norm` and `key_norm` `(head_dim,)` are Qwen3's
    RMSNorm of each head before RoPE.
    """

    qkv: torch.Tensor
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


class Rows(Protocol):
    """A matrix `(outputs, inputs)` whose rows are read in slices, `rows[start:end]` or all with `rows[:]`.

    A tensor is one.
    """

    @property
    def shape(self) -> torch.Size:
        """Return outputs and inputs."""
        ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor:
        """Return rows that stand next to each other."""
        ...


class WeightSource(Protocol):
    """The tensors of one model. Raises ConfigError where a file is broken or a tensor is missing."""

    @property
    def config(self) -> ModelConfig:
        """Return the sizes."""
        ...

    def embedding(self) -> Rows:
        """Return the token embedding `(vocab, hidden)`."""
        ...

    def head(self) -> Rows | None:
        """Return the output projection `(vocab, hidden)`, None where it is the embedding."""
        ...

    def final_norm(self) -> torch.Tensor:
        """Return the weight of the last RMSNorm `(hidden,)`."""
        ...

    def layer(self, number: int) -> LayerWeights:
        """Return the tensors of one layer."""
        ...
