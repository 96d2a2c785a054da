"""Makes a running core out of a model's files: backend, weights, cache, tokenizer, and a first step to warm up.

Runs in the engine's thread, because it takes seconds. Raises ConfigError for what cannot run here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch

from schemas.errors import ConfigError, InvalidRequestError
from workers.generation.engine.backend import CURE, choose_backend, why_slow
from workers.generation.engine.batch import CacheLayout, ModelRunner, Segment, StepBatch
from workers.generation.engine.constraints import ConstraintCompiler
from workers.generation.engine.core import EngineCore
from workers.generation.engine.cuda_device import AttentionFlags, check_precision, set_flags
from workers.generation.engine.kernels import load_library
from workers.generation.engine.limits import Limits
from workers.generation.engine.memory import MemoryParts, free_bytes, num_blocks
from workers.generation.engine.model_folder import load_tokenizer, model_hash, open_source, why_not_own
from workers.generation.engine.opened import OpenedModel, open_model
from workers.generation.engine.paged_cache import resolve_kv_precision
from workers.generation.engine.pages import return_freed
from workers.generation.engine.protocol import ConstraintSpec, EngineIdentity, Tokenizer
from workers.generation.engine.settings import Backend, LocalEngineSettings, Preemption

if TYPE_CHECKING:
    from workers.generation.engine.sequence import Constraint

WARM_TOKENS = 16  # of a first prompt: enough for every kernel, too few to be waited for

_log = structlog.get_logger(__name__)


def refuse_constraint(spec: ConstraintSpec) -> Constraint:
    """Raise InvalidRequestError: this model's answers cannot be given a form."""
    raise InvalidRequestError(f"response_format: {spec.kind} cannot be had from this model", field="response_format")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the engine's thread and the event loop need of a loaded model.

    `memory` says where the engine's memory goes, as far as steps have shown. `compile_constraint` takes milliseconds to
    seconds, in a thread of its own; it raises InvalidRequestError.
    """

    core: EngineCore
    tokenizer: Tokenizer
    identity: EngineIdentity
    vocab_size: int
    layout: CacheLayout | None = None
    memory: Callable[[], MemoryParts] | None = None
    compile_constraint: Callable[[ConstraintSpec], Constraint] = refuse_constraint
    close: Callable[[], None] = lambda: None


def load(folder: Path, settings: LocalEngineSettings) -> Loaded:
    """Load a model, a folder or a GGUF file, and run a first step."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    device = find_device(settings.device)
    flags = set_flags(settings)
    check_precision(settings.precision, device)
    backend = _backend(folder, settings, device)
    tokenizer = load_tokenizer(folder)
    return_freed()  # megabytes of JSON, which the weights would come on top of
    model = open_model(backend, folder, settings, device)
    if tokenizer.vocabulary_size > model.vocab_size:
        raise ConfigError(f"generation.model: {folder}: the tokenizer has more tokens than the model")
    identity = EngineIdentity(
        engine=f"{backend}-{device.type}" + (f"-tp{settings.tensor_parallel}" if settings.tensor_parallel > 1 else ""),
        model=settings.model_name or folder.name,
        weights_hash=model_hash(folder),
        tokenizer_hash=tokenizer.content_hash,
        precision=f"{settings.precision}/kv-{resolve_kv_precision(settings.kv_precision, settings.precision)}",
        max_context=model.max_context,
    )
    runner = _runner(model, identity, settings, device)
    _warm(runner, device, settings)
    return_freed()
    layout = runner.layout

    def memory() -> MemoryParts:
        return MemoryParts(
            weights_bytes=model.weights_bytes,
            kv_bytes=layout.num_blocks * layout.bytes_per_block,
            activation_bytes=model.activation_bytes(runner),
        )

    _report(identity, layout, memory(), flags)
    return Loaded(
        core=EngineCore(runner, tokenizer, max_context=model.max_context, limits=_limits(settings, layout)),
        tokenizer=tokenizer,
        identity=identity,
        vocab_size=model.vocab_size,
        layout=layout,
        memory=memory,
        compile_constraint=ConstraintCompiler(tokenizer, vocab_size=model.vocab_size).compile,
        close=runner.close,
    )


def find_device(name: str) -> torch.device:
    """Return the device of a setting. Raises ConfigError for one that torch cannot use."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ConfigError(f"generation.local.device: {name!r} is not usable: {error}") from error


def _backend(folder: Path, settings: LocalEngineSettings, device: torch.device) -> Backend:
    lacking = why_not_own(folder)
    wants_kernels = lacking is None and settings.backend in (Backend.AUTO, Backend.NATIVE) and device.type == "cpu"
    kernels_lacking = _why_no_kernels(folder) if wants_kernels else None
    num_ranks = settings.tensor_parallel
    backend = choose_backend(
        settings.backend,
        device_type=device.type,
        num_ranks=num_ranks,
        lacking=lacking,
        kernels_lacking=kernels_lacking,
    )
    slow = why_slow(
        backend, settings.precision, device_type=device.type, num_ranks=num_ranks, kernels_lacking=kernels_lacking
    )
    if slow is not None:
        _log.warning("engine_slow", backend=backend, precision=settings.precision, reason=slow, cure=CURE)
    return backend


def _why_no_kernels(folder: Path) -> str | None:
    """Return what keeps the C++ kernels from running a model of the family; None where nothing does."""
    head_dim = open_source(folder).config.head_dim
    if head_dim % 8:
        return f"head_dim {head_dim} is no multiple of 8"
    return None if load_library() is not None else "no kernels are compiled; the log says why (kernels.unavailable)"


def _runner(
    model: OpenedModel, identity: EngineIdentity, settings: LocalEngineSettings, device: torch.device
) -> ModelRunner:
    """Give a model its cache, as large as settings and memory allow."""
    kv_precision = resolve_kv_precision(settings.kv_precision, settings.precision)
    one = model.cache_shape(1, settings.block_size, kv_precision)
    free = max(0, free_bytes(device, settings.memory_limit_bytes) - model.pending_bytes)
    count = num_blocks(
        wanted_tokens=settings.kv_cache_tokens,
        max_sequences=settings.max_sequences,
        max_context=model.max_context,
        block_size=settings.block_size,
        bytes_per_block=one.bytes_per_block,
        free_bytes=free,
        share=settings.kv_memory_share,
    )
    size = count * one.bytes_per_block
    if settings.kv_cache_tokens is not None and size > free:
        raise ConfigError(
            f"generation.local.kv_cache_tokens: no memory for {size >> 20} MB of cache: {free >> 20} MB are free"
        )
    shape = model.cache_shape(count, settings.block_size, kv_precision)
    return model.make_runner(shape, f"{identity.engine}/{identity.weights_hash}/{identity.precision}")


def _limits(settings: LocalEngineSettings, layout: CacheLayout) -> Limits:
    is_swapping = settings.preemption is Preemption.SWAP
    return Limits(
        max_sequences=settings.max_sequences,
        max_batched_tokens=settings.max_batched_tokens,
        max_draft=settings.max_draft,
        max_speculative_rows=settings.max_speculative_rows,
        preemption=settings.preemption,
        swap_blocks=settings.max_swap_bytes // layout.bytes_per_block if is_swapping else 0,
        has_prefix_cache=settings.prefix_cache,
    )


def _warm(runner: ModelRunner, device: torch.device, settings: LocalEngineSettings) -> None:
    """Touch all weights and pick the kernels of both kinds of step; on CUDA also take the memory of the widest one."""
    layout = runner.layout
    most = layout.num_blocks * layout.block_size - 1
    num_tokens = min(settings.max_batched_tokens if device.type == "cuda" else WARM_TOKENS, most)
    blocks = tuple(range(num_tokens // layout.block_size + 1))
    with torch.inference_mode():
        for segment in (
            Segment(token_ids=(0,) * num_tokens, start=0, block_table=blocks),
            Segment(token_ids=(0,), start=num_tokens, block_table=blocks),
        ):
            runner.forward(StepBatch(segments=(segment,)))
        runner.cache.clear_blocks(blocks)


def _report(identity: EngineIdentity, layout: CacheLayout, memory: MemoryParts, flags: AttentionFlags) -> None:
    _log.info(
        "engine_loaded",
        backend=identity.engine,
        model=identity.model,
        precision=identity.precision,
        max_context=identity.max_context,
        cache_tokens=layout.num_blocks * layout.block_size,
        weights_mb=memory.weights_bytes >> 20,
        kv_mb=memory.kv_bytes >> 20,
        threads=torch.get_num_threads(),
        enable_flash_sdp=flags.flash_sdp,
        enable_mem_efficient_sdp=flags.mem_efficient_sdp,
        tf32=flags.tf32,
    )
