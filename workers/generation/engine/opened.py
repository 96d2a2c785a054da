"""A model whose weights are read and that has no cache yet: how large that may be is found out in between.

Knows how each backend is made, not which one is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from workers.generation.engine.batch import ModelRunner
from workers.generation.engine.config import ModelConfig
from workers.generation.engine.cuda_runner import CudaRunner, make_cuda_runner
from workers.generation.engine.kernels import load_library
from workers.generation.engine.model import LlamaModel
from workers.generation.engine.model_folder import gguf_path, open_source
from workers.generation.engine.model_runner import TorchRunner
from workers.generation.engine.native_model import NativeModel
from workers.generation.engine.native_runner import NativeRunner
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision
from workers.generation.engine.settings import Backend, LocalEngineSettings
from workers.generation.engine.tensor_parallel import TensorParallelRunner
from workers.generation.engine.tensor_parallel_rank import RankPlan
from workers.generation.engine.weights_hash import weight_files


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    """`cache_shape` of so many blocks, of a size and precision; `make_runner` adds the cache of a shape and identity.

    `max_context` is what was wanted, or less where the model knows less. `activation_bytes` of the runner is what its
    widest step keeps between the layers: measured where the backend can tell, else an estimate. `pending_bytes` of
    weights on one device are read by `make_runner` only.
    """

    vocab_size: int
    max_context: int
    weights_bytes: int
    activation_bytes: Callable[[ModelRunner], int]
    cache_shape: Callable[[int, int, KVPrecision], CacheShape]
    make_runner: Callable[[CacheShape, str], ModelRunner]
    pending_bytes: int = 0


def open_model(backend: Backend, folder: Path, settings: LocalEngineSettings, device: torch.device) -> OpenedModel:
    """Read a model folder with a backend. Raises ConfigError for what it cannot run."""
    match backend:
        case Backend.TRANSFORMERS:
            return _open_transformers(folder, settings, device)
        case Backend.NATIVE:
            return _open_native(folder, settings)
        case _ if settings.tensor_parallel > 1:
            return _open_ranks(folder, settings, device)
        case _:
            return _open_torch(folder, settings, device)


def estimate_activation_bytes(
    settings: LocalEngineSettings, *, hidden_size: int, inner_size: int, vocab_size: int
) -> int:
    """Return about what the widest step keeps at once: residual, norm and projections of each row, and fp32 logits."""
    numbers = settings.max_batched_tokens * (6 * hidden_size + 3 * inner_size)
    return 4 * (numbers + settings.max_sequences * vocab_size)


def _open_native(folder: Path, settings: LocalEngineSettings) -> OpenedModel:
    library = load_library()
    assert library is not None, "`choose_backend` has asked for it"
    source = open_source(folder)
    max_context = min(settings.max_context, source.config.max_position)
    model = NativeModel(library, source, precision=settings.precision, max_context=max_context)

    def make_runner(shape: CacheShape, identity: str) -> ModelRunner:
        num_threads = settings.num_threads or torch.get_num_threads()
        return NativeRunner(model, shape, identity=identity, num_threads=num_threads)

    return _opened(source.config, max_context, model.weights_bytes, _measured_activations, make_runner)


def _open_torch(folder: Path, settings: LocalEngineSettings, device: torch.device) -> OpenedModel:
    source = open_source(folder)
    max_context = min(settings.max_context, source.config.max_position)
    model = LlamaModel(source, precision=settings.precision, device=device, max_context=max_context)

    def make_runner(shape: CacheShape, identity: str) -> ModelRunner:
        if device.type == "cuda":
            return make_cuda_runner(model, shape, identity=identity, settings=settings)
        return TorchRunner(model, shape, identity=identity)

    return _opened(source.config, max_context, model.weights_bytes, _measured_activations, make_runner)


def _open_ranks(folder: Path, settings: LocalEngineSettings, device: torch.device) -> OpenedModel:
    """Leave the reading to the ranks: each reads its share when the cache's shape is known."""
    source = open_source(folder)
    config, size = source.config, settings.tensor_parallel
    max_context = min(settings.max_context, config.max_position)
    gguf = gguf_path(folder)
    files = weight_files(folder) if gguf is None else [gguf]
    weights_bytes = sum(path.stat().st_size for path in files)  # about: in the numbers of the file
    estimate = estimate_activation_bytes(
        settings, hidden_size=config.hidden_size, inner_size=config.intermediate_size, vocab_size=config.vocab_size
    )

    def make_runner(shape: CacheShape, identity: str) -> ModelRunner:
        plan = RankPlan(
            size=size,
            open_source=partial(open_source, folder),
            shape=shape,
            precision=settings.precision,
            max_context=max_context,
            device_type=device.type,
            num_threads=max(1, (settings.num_threads or torch.get_num_threads()) // size),
            timeout_s=settings.step_limit_s,
        )
        return TensorParallelRunner(plan, vocab_size=config.vocab_size, identity=identity)

    pending = weights_bytes if device.type == "cpu" else weights_bytes // size
    return replace(
        _opened(config, max_context, weights_bytes, lambda runner: estimate, make_runner), pending_bytes=pending
    )


def _open_transformers(folder: Path, settings: LocalEngineSettings, device: torch.device) -> OpenedModel:
    from workers.generation.engine.transformers_model import load_causal_model  # transformers takes seconds to import
    from workers.generation.engine.transformers_runner import TransformersRunner

    model = load_causal_model(folder, precision=settings.precision, device=device, max_context=settings.max_context)
    config = model.module.config
    inner = max(getattr(config, name, 0) or 0 for name in ("intermediate_size", "ffn_dim", "n_inner", "hidden_size"))
    estimate = estimate_activation_bytes(
        settings, hidden_size=config.hidden_size, inner_size=inner, vocab_size=model.vocab_size
    )

    def cache_shape(num_blocks: int, block_size: int, precision: KVPrecision) -> CacheShape:
        return model.cache_shape(num_blocks=num_blocks, block_size=block_size, precision=precision)

    def make_runner(shape: CacheShape, identity: str) -> ModelRunner:
        return TransformersRunner(model, shape, identity=identity)

    return OpenedModel(
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        weights_bytes=sum(tensor.nbytes for tensor in (*model.module.parameters(), *model.module.buffers())),
        activation_bytes=lambda runner: estimate,
        cache_shape=cache_shape,
        make_runner=make_runner,
    )


def _opened(
    config: ModelConfig,
    max_context: int,
    weights_bytes: int,
    activation_bytes: Callable[[ModelRunner], int],
    make_runner: Callable[[CacheShape, str], ModelRunner],
) -> OpenedModel:
    """Return a model of the Llama family."""

    def cache_shape(num_blocks: int, block_size: int, precision: KVPrecision) -> CacheShape:
        return CacheShape(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=num_blocks,
            block_size=block_size,
            precision=precision,
        )

    return OpenedModel(
        vocab_size=config.vocab_size,
        max_context=max_context,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        cache_shape=cache_shape,
        make_runner=make_runner,
    )


def _measured_activations(runner: ModelRunner) -> int:
    assert isinstance(runner, NativeRunner | TorchRunner | CudaRunner)
    return runner.activation_bytes
