"""The share of one rank in a Llama-family model: some of its heads, some of its inner units, some of its vocabulary.

Query, key, value, gate and up are split by outputs, so that a rank's heads and units need nothing of the others; the
projections behind them by inputs, so that the sum over all ranks is the whole (Shoeybi et al. 2019). The output
projection is split by tokens; the embedding and the norms are whole on every rank. The invariant: each weight is used
by one rank, and each bias added once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from schemas.errors import ConfigError
from workers.generation.engine.config import ModelConfig
from workers.generation.engine.weight_source import LayerWeights, Rows, WeightSource


class ShardedSource:
    """A `WeightSource` of what rank `rank` of `size` computes."""

    def __init__(self, whole: WeightSource, rank: int, size: int) -> None:
        self._whole, self._rank, self._size = whole, rank, size
        self._config = shard_config(whole.config, size)

    @property
    def config(self) -> ModelConfig:
        """Return the sizes of the share; `vocab_size` is that of the embedding."""
        return self._config

    def embedding(self) -> Rows:
        """Return the whole token embedding `(vocab, hidden)`."""
        return self._whole.embedding()

    def head(self) -> torch.Tensor:
        """Return this rank's rows of the output projection `(vocab_rows, hidden)`; those behind the last are zeros."""
        head = self._whole.head()
        if head is None:
            head = self._whole.embedding()
        rows = vocab_rows(self._whole.config, self._size)
        own = head[self._rank * rows : (self._rank + 1) * rows]
        return F.pad(own, (0, 0, 0, rows - len(own))).clone()

    def final_norm(self) -> torch.Tensor:
        """Return the weight of the last RMSNorm `(hidden,)`."""
        return self._whole.final_norm()

    def layer(self, number: int) -> LayerWeights:
        """Return this rank's part of one layer."""
        layer, config = self._whole.layer(number), self._whole.config
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv, gate_up = (query, key, key), (config.intermediate_size, config.intermediate_size)
        return replace(
            layer,
            qkv=self._outputs(layer.qkv, qkv),
            out=self._inputs(layer.out),
            gate_up=self._outputs(layer.gate_up, gate_up),
            down=self._inputs(layer.down),
            qkv_bias=None if layer.qkv_bias is None else self._outputs(layer.qkv_bias, qkv),
            gate_up_bias=None if layer.gate_up_bias is None else self._outputs(layer.gate_up_bias, gate_up),
            out_bias=self._once(layer.out_bias),
            down_bias=self._once(layer.down_bias),
        )

    def _outputs(self, fused: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's rows of each of the matrices that stand on top of each other."""
        return torch.cat([part.chunk(self._size)[self._rank] for part in torch.split(fused, list(sizes))])

    def _inputs(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns, in memory of their own."""
        return weight.chunk(self._size, dim=1)[self._rank].clone(memory_format=torch.contiguous_format)

    def _once(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return a bias behind a sum over ranks: the first one's alone; zeros keep the others' shape."""
        return bias if bias is None or self._rank == 0 else torch.zeros_like(bias)


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """Return the sizes of one rank's share. Raises ConfigError where the heads or inner units cannot be split."""
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise ConfigError(
                f"generation.local.tensor_parallel: {size} does not divide this model's {name} {getattr(config, name)}"
            )
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
        is_tied=False,
    )


def vocab_rows(config: ModelConfig, size: int) -> int:
    """Return how many tokens each rank has logits of."""
    return -(-config.vocab_size // size)
