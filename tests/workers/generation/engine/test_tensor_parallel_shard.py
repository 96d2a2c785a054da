"""The shares of all ranks together are the whole model, each weight once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from schemas.errors import ConfigError
from workers.generation.engine.config import ModelConfig, RopeConfig
from workers.generation.engine.tensor_parallel_shard import ShardedSource, vocab_rows
from workers.generation.engine.weight_source import LayerWeights

CONFIG = ModelConfig(
    model_type="llama",
    vocab_size=51,
    hidden_size=20,
    intermediate_size=36,
    num_layers=1,
    num_heads=12,
    num_kv_heads=6,
    head_dim=4,
    norm_eps=1e-5,
    max_position=64,
    is_tied=False,
    rope=RopeConfig(),
    windows=(None,),
    has_qkv_bias=True,
    has_out_bias=True,
    has_mlp_bias=True,
)


class RandomSource:
    """A `WeightSource` of random numbers."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._embedding, self._head = random(config.vocab_size, hidden), random(config.vocab_size, hidden)
        self._layer = LayerWeights(
            qkv=random(query + 2 * key, hidden),
            out=random(hidden, query),
            gate_up=random(2 * inner, hidden),
            down=random(hidden, inner),
            attention_norm=random(hidden),
            mlp_norm=random(hidden),
            qkv_bias=random(query + 2 * key),
            out_bias=random(hidden),
            gate_up_bias=random(2 * inner),
            down_bias=random(hidden),
        )

    def embedding(self) -> torch.Tensor:
        return self._embedding

    def head(self) -> torch.Tensor | None:
        return None if self.config.is_tied else self._head

    def final_norm(self) -> torch.Tensor:
        return torch.ones(self.config.hidden_size)

    def layer(self, number: int) -> LayerWeights:
        return self._layer


def shares(source: RandomSource, size: int) -> list[ShardedSource]:
    return [ShardedSource(source, rank, size) for rank in range(size)]


def attention(layer: LayerWeights, config: ModelConfig, rows: torch.Tensor) -> torch.Tensor:
    """Self-attention without positions over `rows` `(T, hidden)`, up to the sum over ranks."""
    heads = F.linear(rows, layer.qkv, layer.qkv_bias).view(len(rows), -1, config.head_dim).transpose(0, 1)
    query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads])
    mixed = F.scaled_dot_product_attention(query[None], key[None], value[None], enable_gqa=True)[0]
    return F.linear(mixed.transpose(0, 1).flatten(1), layer.out, layer.out_bias)


def mlp(layer: LayerWeights, rows: torch.Tensor) -> torch.Tensor:
    """The inner layer over `rows` `(T, hidden)`, up to the sum over ranks."""
    gate, up = F.linear(rows, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_the_shares_of_a_layer_add_up_to_it(size: int) -> None:
    source = RandomSource(CONFIG)
    rows = torch.randn((5, CONFIG.hidden_size), generator=torch.Generator().manual_seed(6))
    parts = [(share.layer(0), share.config) for share in shares(source, size)]
    whole = source.layer(0)
    attended = sum(attention(layer, config, rows) for layer, config in parts)
    inner = sum(mlp(layer, rows) for layer, _ in parts)
    torch.testing.assert_close(attended, attention(whole, CONFIG, rows), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(inner, mlp(whole, rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_shares_of_the_head_are_its_rows_and_zeros_behind(size: int, *, is_tied: bool) -> None:
    source = RandomSource(replace(CONFIG, is_tied=is_tied))
    whole = source.head()
    stacked = torch.cat([share.head() for share in shares(source, size)])
    assert stacked.shape == (size * vocab_rows(CONFIG, size), CONFIG.hidden_size)
    assert torch.equal(stacked[: CONFIG.vocab_size], source.embedding() if whole is None else whole)
    assert not stacked[CONFIG.vocab_size :].any()


def test_a_share_does_not_keep_the_whole_in_memory() -> None:
    source = RandomSource(CONFIG)
    (layer, *_) = (share.layer(0) for share in shares(source, 2))
    for part in (layer.qkv, layer.out, layer.gate_up, layer.down):
        assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize(("size", "name"), [(4, "num_kv_heads 6"), (5, "num_heads 12"), (12, "num_kv_heads 6")])
def test_heads_that_cannot_be_split_are_refused_by_name(size: int, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"tensor_parallel: {size} does not divide this model's {name}"):
        ShardedSource(RandomSource(CONFIG), 0, size)
