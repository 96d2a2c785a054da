"""Makes a running core out of a model folder: configuration, weights, cache, tokenizer, and a first step to warm up.

Runs in the engine's thread, because it takes seconds. Raises ConfigError for what this engine cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from schemas.errors import ConfigError
from workers.generation.engine.config import ModelConfig, read_config
from workers.generation.engine.core import EngineCore
from workers.generation.engine.kv_cache import SlotCache
from workers.generation.engine.model import DecodeRows, LlamaModel, PrefillChunk
from workers.generation.engine.protocol import EngineIdentity, Precision, Tokenizer
from workers.generation.engine.settings import LocalEngineSettings
from workers.generation.engine.tokenizer import BytePairTokenizer
from workers.generation.engine.weights import weights_hash

DTYPES = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the engine's thread and the event loop need of a loaded model."""

    core: EngineCore
    tokenizer: Tokenizer
    identity: EngineIdentity
    vocab_size: int


class SlotRunner:
    """A `ModelRunner` over one model and its cache."""

    def __init__(self, model: LlamaModel, cache: SlotCache) -> None:
        self._model = model
        self._cache = cache

    def forward(self, decode: DecodeRows | None, prefill: PrefillChunk | None) -> torch.Tensor:
        """Return logits `(num_decode + 1 if prefill, vocab)` fp32 on the CPU."""
        return self._model.forward(self._cache, decode, prefill).cpu()

    def fork(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another."""
        self._cache.copy(source, target, length)

    def clear(self, slot: int) -> None:
        """Forget what stands in a slot."""
        self._cache.clear(slot)


def load(folder: Path, settings: LocalEngineSettings) -> Loaded:
    """Load a model folder and run a first step."""
    config = read_config(folder)
    tokenizer = BytePairTokenizer.load(folder)
    if tokenizer.vocabulary_size > config.vocab_size:
        raise ConfigError(f"generation.model: {folder}: the tokenizer has more tokens than the model")
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    device = _device(settings.device)
    max_context = min(settings.max_context, config.max_position)
    runner = _runner(folder, config, settings, device, max_context)
    identity = EngineIdentity(
        engine="local",
        model=settings.model_name or folder.name,
        weights_hash=weights_hash(folder),
        tokenizer_hash=tokenizer.content_hash,
        precision=settings.precision,
        max_context=max_context,
    )
    core = EngineCore(
        runner,
        tokenizer,
        vocab_size=config.vocab_size,
        max_context=max_context,
        num_slots=settings.max_sequences,
        prefill_chunk=settings.prefill_chunk,
    )
    _warm(runner)
    return Loaded(core=core, tokenizer=tokenizer, identity=identity, vocab_size=config.vocab_size)


def _runner(
    folder: Path, config: ModelConfig, settings: LocalEngineSettings, device: torch.device, max_context: int
) -> SlotRunner:
    dtype = DTYPES[settings.precision]
    model = LlamaModel.load(folder, config, max_context=max_context, dtype=dtype, device=device)
    cache = SlotCache(
        num_layers=config.num_layers,
        num_slots=settings.max_sequences,
        num_kv_heads=config.num_kv_heads,
        max_context=max_context,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )
    return SlotRunner(model, cache)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ConfigError(f"generation.device: {name!r} is not usable: {error}") from error


def _warm(runner: SlotRunner) -> None:
    """Touch all weights and pick the kernels of both kinds of step."""
    runner.forward(None, PrefillChunk(token_ids=(0,) * 4, slot=0, start=0))
    runner.forward(DecodeRows(token_ids=(0,), slots=(0,), positions=(4,)), None)
