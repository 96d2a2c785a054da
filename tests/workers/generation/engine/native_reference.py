"""A tiny random model, its naive forward pass in torch, and what runs it natively: for the tests of the C++ kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.config import ModelConfig, RopeConfig
from workers.generation.engine.kernels import Library, load_library
from workers.generation.engine.native_model import NativeModel
from workers.generation.engine.native_runner import NativeRunner
from workers.generation.engine.paged_cache import KV_DTYPES, CacheShape, quantize_kv
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.quantize import quantize_int8, rotate, split
from workers.generation.engine.rope import rope_table
from workers.generation.engine.weight_source import LayerWeights

MAX_CONTEXT = 400
ROW_STEPS = 63  # of a row's numbers, as quantize.h has them
TINY = ModelConfig(
    model_type="llama",
    vocab_size=83,
    hidden_size=40,
    intermediate_size=72,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    max_position=MAX_CONTEXT,
    is_tied=True,
    rope=RopeConfig(),
    windows=(None, None),
)
DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


class RandomSource:
    """A `WeightSource` of random numbers that depend on the seed alone."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self._seed = seed

    def embedding(self) -> torch.Tensor:
        return self._numbers(1_000, self.config.vocab_size, self.config.hidden_size)

    def head(self) -> torch.Tensor | None:
        return None if self.config.is_tied else self._numbers(1_001, self.config.vocab_size, self.config.hidden_size)

    def final_norm(self) -> torch.Tensor:
        return self._norm(1_002, self.config.hidden_size)

    def layer(self, number: int) -> LayerWeights:
        config, first = self.config, 20 * number
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        hidden, wide = config.hidden_size, config.intermediate_size
        return LayerWeights(
            qkv=self._numbers(first, query + 2 * key, hidden),
            out=self._numbers(first + 1, hidden, query),
            gate_up=self._numbers(first + 2, 2 * wide, hidden),
            down=self._numbers(first + 3, hidden, wide),
            attention_norm=self._norm(first + 4, hidden),
            mlp_norm=self._norm(first + 5, hidden),
            qkv_bias=self._numbers(first + 6, query + 2 * key) if config.has_qkv_bias else None,
            out_bias=self._numbers(first + 7, hidden) if config.has_out_bias else None,
            gate_up_bias=self._numbers(first + 8, 2 * wide) if config.has_mlp_bias else None,
            down_bias=self._numbers(first + 9, hidden) if config.has_mlp_bias else None,
            query_norm=self._norm(first + 10, config.head_dim) if config.has_head_norms else None,
            key_norm=self._norm(first + 11, config.head_dim) if config.has_head_norms else None,
        )

    def _numbers(self, name: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 10_000 + name)
        return torch.randn(shape, generator=generator).mul(1.5 / math.sqrt(shape[-1]))

    def _norm(self, name: int, size: int) -> torch.Tensor:
        return 1 + 0.2 * self._numbers(name, size)


@dataclass(frozen=True, slots=True)
class Formats:
    """Number formats of weights and cache."""

    weights: Precision = Precision.FP32
    cache: KVPrecision = KVPrecision.FP32


EXACT = Formats()


@torch.inference_mode()
def naive_logits(source: RandomSource, formats: Formats, token_ids: Sequence[int]) -> torch.Tensor:
    """Return logits `(len(token_ids), vocab)` of a whole forward pass without any cache, rounded as the formats say."""
    config = source.config

    def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = round_rows(rows) if formats.weights is Precision.INT8 else rows
        return F.linear(rows, round_weight(weight, formats.weights), bias)

    cos, sin = (table[: len(token_ids), None] for table in rope_table(config, MAX_CONTEXT))  # (T, 1, head_dim / 2)
    embedding = source.embedding()
    hidden = round_weight(embedding, formats.weights)[list(token_ids)]  # (T, hidden)
    for number in range(config.num_layers):
        layer = source.layer(number)
        qkv = linear(_norm(config, hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
        heads = qkv.view(len(token_ids), -1, config.head_dim)  # (T, num_heads + 2 num_kv_heads, head_dim)
        query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = _norm(config, query, layer.query_norm), _norm(config, key, layer.key_norm)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        key, value = round_kv(key, formats.cache), round_kv(value, formats.cache)
        mixed = _attend(config, query, key, value, config.windows[number])
        hidden = hidden + linear(mixed, layer.out, layer.out_bias)
        gate, up = linear(_norm(config, hidden, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        hidden = hidden + linear(F.silu(gate) * up, layer.down, layer.down_bias)
    head = source.head()
    return linear(_norm(config, hidden, source.final_norm()), embedding if head is None else head)


def round_weight(weight: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Return what is left of a matrix in a number format, fp32."""
    if precision is Precision.INT8:
        return quantize_int8(weight).dequantize()
    return weight.to(DTYPES.get(precision, torch.float32)).float()


def round_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return what is left of rows `(T, inputs)` in 7 bits with a scale for each rotated group."""
    groups = split(rotate(rows))  # (T, groups, GROUP_SIZE)
    scales = (groups.abs().amax(-1, keepdim=True) / ROW_STEPS).clamp(min=1e-30)  # (T, groups, 1)
    return rotate(((groups / scales).round() * scales).flatten(-2))[:, : rows.shape[-1]]


def round_kv(numbers: torch.Tensor, precision: KVPrecision) -> torch.Tensor:
    """Return what is left of keys or values `(T, heads, head_dim)` in a number format, fp32."""
    if precision is KVPrecision.INT8:
        values, scales = quantize_kv(numbers)
        return values.float() * scales[..., None]
    return numbers.to(KV_DTYPES[precision]).float()


def _norm(config: ModelConfig, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + config.norm_eps)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _attend(
    config: ModelConfig, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None
) -> torch.Tensor:
    places = torch.arange(len(query))
    age = places[:, None] - places  # (T, T)
    visible = (age >= 0) & (age < (window or len(query)))
    key, value = (part.repeat_interleave(config.group_size, dim=1) for part in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / config.head_dim**0.5
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)  # (heads, T, T)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(len(query), -1)


def native_library() -> Library:
    """Return the compiled kernels; skips the test where there is no compiler."""
    library = load_library()
    if library is None:
        pytest.skip("no C++ compiler")
    return library


def make_runner(
    source: RandomSource,
    formats: Formats = EXACT,
    *,
    block_size: int = 16,
    num_blocks: int = 64,
    num_threads: int = 2,
    library: Library | None = None,
) -> NativeRunner:
    """Return a runner over a packed model, with a cache of its own."""
    config = source.config
    model = NativeModel(library or native_library(), source, precision=formats.weights, max_context=MAX_CONTEXT)
    shape = CacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        precision=formats.cache,
    )
    return NativeRunner(model, shape, identity="tiny", num_threads=num_threads)


def random_ids(length: int, seed: int = 0, vocab_size: int = TINY.vocab_size) -> tuple[int, ...]:
    """Return token ids that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(vocab_size, (length,), generator=generator).tolist())


def prompt_segment(token_ids: Sequence[int], blocks: Sequence[int], *, num_logits: int | None = None) -> Segment:
    """Return a whole prompt as one segment; all rows want their logits where nothing else is said."""
    wanted = len(token_ids) if num_logits is None else num_logits
    return Segment(token_ids=token_ids, start=0, block_table=blocks, num_logits=wanted)


def run_in_chunks(
    runner: NativeRunner, token_ids: Sequence[int], blocks: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor:
    """Return the logits of all tokens `(len(token_ids), vocab)`, run in steps of these lengths, the last repeated."""
    parts, start, steps = [], 0, list(lengths)
    while start < len(token_ids):
        size = steps.pop(0) if len(steps) > 1 else steps[0]
        chunk = token_ids[start : start + size]
        segment = Segment(token_ids=chunk, start=start, block_table=blocks, num_logits=len(chunk))
        parts.append(runner.forward(StepBatch(segments=(segment,))))
        start += len(chunk)
    return torch.cat(parts)


def changed(**sizes: object) -> ModelConfig:
    """Return the tiny configuration with other sizes."""
    return replace(TINY, **sizes)  # type: ignore[arg-type]
