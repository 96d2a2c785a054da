"""Compares a model's run over a paged cache with its plain run, on a short prompt.

Whatever a model does with its rows that the paged attention does not know of (positions counted by itself, a state
between calls, biases of its own) shows here as other logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.paged_cache import CacheShape, PagedCache
from workers.generation.engine.protocol import KVPrecision
from workers.generation.engine.transformers_attention import PAGED
from workers.generation.engine.transformers_probe import AttentionShape, UnsupportedError
from workers.generation.engine.transformers_step import make_native_attention, run_step

CHECKED_TOKENS = 40
BLOCK_SIZE = 8
CUTS = (
    (0, 13, 14, 19, CHECKED_TOKENS),
    (0, 1, 17, 38, CHECKED_TOKENS),
)  # a chunk, a decode, drafts, a chunk; and another order beside it
TABLES = ((7, 2, 9, 4, 1), (3, 8, 0, 6, 5))  # of the two prompts, shuffled
# Of the difference to the plain run, relative to its logits. Another order of summation moves fp32 by 1e-5; a neighbour
# or a position that is wrong moves it by tenths. Half precision rounds each layer, and routers of experts may flip.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}
KV_PRECISIONS = {
    torch.float32: KVPrecision.FP32,
    torch.float16: KVPrecision.FP16,
    torch.bfloat16: KVPrecision.BF16,
}


def check_paged_run(module: Any, attention: AttentionShape) -> int:
    """Run two prompts both ways and return the size of the vocabulary. Raises UnsupportedError where they differ."""
    prompts = _prompts(module)  # (2, CHECKED_TOKENS)
    module.set_attn_implementation("sdpa" if module._supports_sdpa else "eager")
    with torch.inference_mode():
        plain = module(input_ids=prompts, use_cache=False).logits.float()  # (2, CHECKED_TOKENS, vocab)
    module.set_attn_implementation(PAGED)
    for expected, found in zip(plain, _paged(module, attention, prompts.tolist()), strict=True):
        distance = float((found - expected).norm() / expected.norm())
        if not distance <= TOLERANCES[module.dtype]:
            raise UnsupportedError(f"its run over a paged cache is off its plain run by {distance:.2g} of its logits")
    return int(plain.shape[-1])


def _prompts(module: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    size = int(module.get_input_embeddings().weight.shape[0])
    return torch.randint(size, (len(TABLES), CHECKED_TOKENS), generator=generator).to(module.device)


def _paged(module: Any, attention: AttentionShape, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Run each prompt in pieces, next to pieces of the other, and return its logits `(CHECKED_TOKENS, vocab)`."""
    shape = CacheShape(
        num_layers=len(attention.windows),
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        num_blocks=sum(map(len, TABLES)),
        block_size=BLOCK_SIZE,
        precision=KV_PRECISIONS[module.dtype],
    )
    cache = PagedCache(shape, module.device)
    native = make_native_attention(cache, attention)
    steps = []
    for number in range(len(CUTS[0]) - 1):
        segments = tuple(_piece(tokens, number, *place) for tokens, *place in zip(prompts, CUTS, TABLES, strict=True))
        logits = run_step(module, cache, StepBatch(segments=segments), attention, native)
        steps.append(torch.split(logits, [segment.num_logits for segment in segments]))
    return [torch.cat(parts) for parts in zip(*steps, strict=True)]


def _piece(tokens: Sequence[int], number: int, cuts: Sequence[int], table: Sequence[int]) -> Segment:
    """Return one piece of a prompt, all of whose rows want logits."""
    piece = tokens[cuts[number] : cuts[number + 1]]
    return Segment(token_ids=piece, start=cuts[number], block_table=table, num_logits=len(piece))
