"""What a `transformers` model asks of its attention, found out by one short run.

The masks that the model builds tell what each layer sees at any position up to the longest context, so that windows are
known without running a prompt of that length. The invariant: what the paged attention would not do exactly is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from workers.generation.engine.transformers_attention import PROBE, attending, running_step

NUM_TOKENS = 4
UNSUPPORTED = ("s_aux", "sinks", "position_bias", "head_mask")  # arguments that change the scores or weights


class UnsupportedError(Exception):
    """The model wants something that the paged attention does not have; the text names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What all layers share, and the sliding window of each: a token sees itself and window - 1 before it.

    `group_size` query heads share a key/value head.
    """

    group_size: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


class ProbeStep:
    """Records each layer's call, and attends over the new tokens alone."""

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.windows: dict[int, int | None] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: dict[str, Any]
    ) -> torch.Tensor:
        """Return `(T, num_heads, head_dim)`; see `AttentionStep`."""
        for name in UNSUPPORTED:
            if call.get(name) is not None:
                raise UnsupportedError(f"attention with {name}")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise UnsupportedError("keys and values of different sizes")
        if layer in self.shapes:
            raise UnsupportedError("layers that attend twice")
        self.shapes[layer] = (query.shape[1] // key.shape[1], key.shape[1], key.shape[2])
        self.windows[layer] = _window(call["attention_mask"])
        heads, keys, values = (part.transpose(0, 1)[None] for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(heads, keys, values, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1)


def probe_attention(module: Any, num_layers: int, max_context: int) -> AttentionShape:
    """Run `module` once. Raises UnsupportedError for what the paged attention cannot do."""
    step = ProbeStep(max_context)
    _register_mask()
    module.set_attn_implementation(PROBE)
    tokens = torch.arange(NUM_TOKENS, device=module.device)[None]  # (1, NUM_TOKENS)
    with torch.inference_mode(), attending(step):
        module(input_ids=tokens, position_ids=tokens, use_cache=False)
    missing = set(range(num_layers)) ^ set(step.shapes)
    if missing:
        raise UnsupportedError(f"layers without attention of their own: {sorted(missing)}")
    if len(set(step.shapes.values())) != 1:
        raise UnsupportedError("layers with different numbers or sizes of heads")
    group_size, num_kv_heads, head_dim = step.shapes[0]
    windows = tuple(step.windows[layer] for layer in range(num_layers))
    return AttentionShape(group_size=group_size, num_kv_heads=num_kv_heads, head_dim=head_dim, windows=windows)


def _register_mask() -> None:
    """Have `transformers` give us, in place of a mask for the probe's tokens, rows of the mask of a full context."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _mask)


def _mask(*, mask_function: Callable[..., torch.Tensor], **_: object) -> torch.Tensor:
    """Return what the sampled rows see `(1, 1, rows, max_context)`, as `transformers` calls it to build a mask."""
    step = running_step()
    assert isinstance(step, ProbeStep)
    zero = torch.zeros((), dtype=torch.long)
    places = torch.arange(step.max_context)
    rows = places[_sampled(step.max_context)]
    seen = mask_function(zero, zero, rows[:, None], places)
    return seen.expand(len(rows), len(places))[None, None]


def _sampled(max_context: int) -> list[int]:
    """The first and last rows, and some between: a mask that is neither causal nor a window differs in one of them."""
    return sorted(
        {0, 1, max_context // 3, max_context // 2, max_context - 2, max_context - 1} & set(range(max_context))
    )


def _window(mask: Any) -> int | None:
    """Return the window that `mask` `(1, 1, rows, max_context)` means, None for all positions before the token."""
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool or mask.ndim != 4:
        raise UnsupportedError("attention masks that are not built through the mask interface")
    seen = mask[0, 0]  # (rows, max_context)
    length = seen.shape[1]
    places = torch.arange(length)
    rows = places[_sampled(length)][:, None]
    window = int(seen[-1].sum())
    if not torch.equal(seen, (places <= rows) & (places > rows - window)):
        raise UnsupportedError("attention masks that are neither causal nor sliding windows")
    return None if window == length else window
