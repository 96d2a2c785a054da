"""Runs a Llama-family model in torch on CUDA: fused decode attention, recorded decode steps, memory given back.

Knows batches and blocks, no requests. A step that only decodes is replayed from a graph where one holds it; any other
runs as it is. The invariant: the cache has one block more than its layout tells, which only rows that fill a graph up
write to.
"""

from __future__ import annotations

from dataclasses import replace

import structlog
import torch

from workers.generation.engine import cuda_memory
from workers.generation.engine.batch import CacheLayout, StepBatch
from workers.generation.engine.cuda_attention import PagedAttention, find_paged_attention
from workers.generation.engine.cuda_graph import DecodeGraphs, DecodeRows, Recorder, cuda_recorder
from workers.generation.engine.cuda_step import FusedRows, LayerAttention, MixedStep
from workers.generation.engine.model import LlamaModel
from workers.generation.engine.model_runner import estimate_bytes
from workers.generation.engine.paged_cache import CacheShape, PagedCache
from workers.generation.engine.settings import LocalEngineSettings

MIN_SPLIT, MAX_SPLITS = 256, 16  # of a context: enough programs to fill a device, few results to keep and add

_log = structlog.get_logger(__name__)


class CudaRunner:
    """A `ModelRunner` over a loaded model and a cache of its own. `identity` names weights and precision."""

    def __init__(
        self,
        model: LlamaModel,
        shape: CacheShape,
        *,
        identity: str,
        kernel: PagedAttention | None,
        recorder: Recorder | None,
        max_rows: int,
    ) -> None:
        """Allocate the cache. Without a `kernel` torch attends; without a `recorder`, or a kernel, nothing is recorded.

        `max_rows` are those of the widest step that only decodes.
        """
        self._model: LlamaModel | None = model
        self._layout = shape.layout(identity)
        self._vocab_size, self._device, self._activation_bytes = model.vocab_size, model.device, 0
        cache = PagedCache(replace(shape, num_blocks=shape.num_blocks + 1), model.device)
        self._layers: LayerAttention | None = LayerAttention(
            cache=cache,
            windows=model.config.windows,
            scale=model.config.head_dim**-0.5,
            group_size=model.config.group_size,
            kernel=kernel,
            split=split_size(model.max_context),
        )
        self._graphs: DecodeGraphs | None = None
        if recorder is not None and kernel is not None:
            self._graphs = self._record(recorder, max_rows)

    @property
    def cache(self) -> PagedCache:
        """Return the cache that steps read and write."""
        return self._opened[1].cache

    @property
    def layout(self) -> CacheLayout:
        """Return the shape of the cache, without the block that is no sequence's."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Return the number of columns of the logits."""
        return self._vocab_size

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of the weights."""
        return 0 if self._model is None else self._model.weights_bytes

    @property
    def activation_bytes(self) -> int:
        """Return about what the widest step so far has kept at once between the layers, with its logits."""
        return self._activation_bytes

    @property
    def is_attention_fused(self) -> bool:
        """Say whether decodes attend through the fused kernel."""
        return self._opened[1].kernel is not None

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Return the numbers of rows that are recorded."""
        return () if self._graphs is None else self._graphs.sizes

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return logits `(batch.num_logits, vocab_size)` fp32 on the CPU."""
        model, layers = self._opened
        self._activation_bytes = max(self._activation_bytes, estimate_bytes(model, batch))
        with cuda_memory.returning_memory():
            if self._graphs is not None and self._graphs.can_run(batch):
                return self._graphs.run(batch).cpu()
            step = MixedStep(layers, batch, self._device)
            return model.forward(step.token_ids, step.positions, step.attend, step.wanted).cpu()

    def allocator_slack_bytes(self) -> int:
        """Return what the device's allocator has reserved and not handed out."""
        return cuda_memory.allocator_slack_bytes(self._device)

    def close(self) -> None:
        """Free graphs, weights and cache. Idempotent."""
        self._graphs = self._model = self._layers = None
        torch.cuda.empty_cache()

    @property
    def _opened(self) -> tuple[LlamaModel, LayerAttention]:
        assert self._model is not None and self._layers is not None, "the runner is closed"
        return self._model, self._layers

    @torch.inference_mode()
    def _record(self, recorder: Recorder, max_rows: int) -> DecodeGraphs:
        model, layers = self._opened
        max_blocks = -(-model.max_context // self._layout.block_size)

        def decode(rows: DecodeRows) -> torch.Tensor:
            fused = FusedRows(layers, rows, max_length=max_blocks * self._layout.block_size)
            return model.forward(rows.token_ids.long(), rows.positions.long(), fused.attend)

        graphs = DecodeGraphs(
            decode,
            max_rows=max_rows,
            max_blocks=max_blocks,
            scratch_block=self._layout.num_blocks,
            vocab_size=self._vocab_size,
            device=self._device,
            recorder=recorder,
        )
        graphs.record()
        return graphs


def split_size(max_context: int) -> int:
    """Return how many positions one program of the fused kernel walks, a power of two: MAX_SPLITS make a context."""
    share = -(-max_context // MAX_SPLITS)
    return max(MIN_SPLIT, 1 << (share - 1).bit_length())


def make_cuda_runner(
    model: LlamaModel, shape: CacheShape, *, identity: str, settings: LocalEngineSettings
) -> CudaRunner:
    """Return the runner of a model that stands on a CUDA device, with whatever runs there, and record its decodes."""
    if model.device.index is not None:
        torch.cuda.set_device(model.device)  # of this thread: kernels and graphs go to the device that is set
    runner = CudaRunner(
        model,
        shape,
        identity=identity,
        kernel=find_paged_attention(shape, model.config.group_size, model.dtype, split=split_size(model.max_context)),
        recorder=cuda_recorder(model.device) if settings.cuda_graphs else None,
        max_rows=min(settings.max_sequences * (1 + settings.max_draft), settings.max_batched_tokens),
    )
    _log.info(
        "cuda.ready",
        device=torch.cuda.get_device_name(model.device),
        capability=torch.cuda.get_device_capability(model.device),
        is_attention_fused=runner.is_attention_fused,
        graph_sizes=runner.graph_sizes,
    )
    return runner
