"""Loads a causal language model through `transformers`, as far as this engine can run it exactly.

Knows folders with `config.json` and safetensors, no cache. Nothing is fetched, unpickled or run from the folder. The
invariant: a model whose paged run differs from its plain run is refused by the name of its architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from schemas.errors import ConfigError
from workers.generation.engine.linear import FLOATS
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.transformers_attention import register_attention
from workers.generation.engine.transformers_check import CHECKED_TOKENS, check_paged_run
from workers.generation.engine.transformers_probe import AttentionShape, UnsupportedError, probe_attention
from workers.generation.engine.weights_hash import weight_files

SENSES = ("vision", "audio", "image", "speech")
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})  # one table for the whole batch, by its longest context


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalModel:
    """A loaded and checked model. `module` computes; its attention wants a step."""

    module: Any
    num_layers: int
    vocab_size: int
    max_context: int
    attention: AttentionShape

    def cache_shape(self, *, num_blocks: int, block_size: int, precision: KVPrecision) -> CacheShape:
        """Return the shape of a cache for this model."""
        return CacheShape(
            num_layers=self.num_layers,
            num_kv_heads=self.attention.num_kv_heads,
            head_dim=self.attention.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            precision=precision,
        )


def load_causal_model(folder: Path, *, precision: Precision, device: torch.device, max_context: int) -> CausalModel:
    """Load and check. `max_context` is lowered to what the model knows.

    Raises ConfigError for a broken folder, a precision other than fp32, bf16 and fp16, and a model that cannot be run
    over a paged cache.
    """
    if precision not in FLOATS:
        raise ConfigError(f"generation.precision: {precision} is not for the backend transformers")
    weight_files(folder)
    config = _read_config(folder)
    register_attention()
    module = _read_module(folder, config, FLOATS[precision]).to(device).eval()
    known = min(_limits(config), default=max(max_context, CHECKED_TOKENS))
    try:
        return _checked(module, config.num_hidden_layers, known, min(max_context, known))
    except UnsupportedError as error:
        architecture = type(module).__name__
        raise ConfigError(f"generation.model: {folder}: {architecture} is not supported: {error}") from error


def _checked(module: Any, num_layers: int, known: int, max_context: int) -> CausalModel:
    _refuse_class(module, known)
    try:
        attention = probe_attention(module, num_layers, max(max_context, CHECKED_TOKENS))
        vocab_size = check_paged_run(module, attention)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise UnsupportedError(f"its layers cannot be run over a paged cache ({error!r})") from error
    return CausalModel(
        module=module, num_layers=num_layers, vocab_size=vocab_size, max_context=max_context, attention=attention
    )


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"generation.model: cannot read {folder}/config.json: {error}") from error
    found = {
        "is no causal language model": config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "is an encoder-decoder": config.is_encoder_decoder,
        "takes more than text": any(sense in name for name in config.sub_configs for sense in SENSES),
        "has quantized weights": getattr(config, "quantization_config", None) is not None,
    }
    for reason, is_so in found.items():
        if is_so:
            raise ConfigError(f"generation.model: {folder}: {config.model_type!r} {reason}; it is not supported")
    return config


def _read_module(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError) as error:
        raise ConfigError(f"generation.model: cannot load {folder}: {error}") from error
    if report["missing_keys"]:
        raise ConfigError(f"generation.model: {folder} lacks the weights {sorted(report['missing_keys'])[:4]}")
    return module


def _refuse_class(module: Any, known: int) -> None:
    if known < CHECKED_TOKENS:
        raise UnsupportedError(f"contexts of only {known} tokens")
    if not module.is_backend_compatible() or not module._can_set_attn_implementation():
        raise UnsupportedError("its attention cannot be replaced")


def _limits(config: Any) -> Iterator[int]:
    """Yield the lengths that a context must not exceed."""
    known = getattr(config, "max_position_embeddings", None)
    if known:
        yield int(known)
    for rope in _ropes(getattr(config, "rope_parameters", None) or {}):
        if rope["rope_type"] in LENGTH_DEPENDENT_ROPE:
            original = rope.get("original_max_position_embeddings") or known
            if original:
                yield int(original)


def _ropes(parameters: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of RoPE: one mapping, or one for each type of layer."""
    if "rope_type" in parameters:
        yield parameters
    for part in parameters.values():
        if isinstance(part, Mapping):
            yield from _ropes(part)
