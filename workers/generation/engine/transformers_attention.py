"""The attention that a `transformers` model calls, over this engine's paged cache.

`transformers` lets a model's attention be replaced by a registered function, which gets queries, keys and values of
the new tokens. Ours hands them to the step that runs: `PagedStep`, which runs a batch, or the probe of the load. The
invariant: outside a step it fails, so that nothing runs over unmasked rows by accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

PAGED = "gea_paged"
PROBE = "gea_probe"
_STEP: ContextVar[AttentionStep] = ContextVar("step")  # no argument of the call: some models do not pass these on


class AttentionStep(Protocol):
    """What a layer's attention is handed to."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: dict[str, Any]
    ) -> torch.Tensor:
        """Return `(T, num_heads, head_dim)` for queries of that shape, keys and values `(T, num_kv_heads, head_dim)`.

        `call` are the further arguments of the model, `attention_mask` among them.
        """
        ...


@contextmanager
def attending(step: AttentionStep) -> Iterator[None]:
    """Have the attention of every model that runs inside handed to `step`."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def running_step() -> AttentionStep:
    """Return the step inside of which this runs. Raises LookupError outside of any."""
    return _STEP.get()


def register_attention() -> None:
    """Make the names `PAGED` and `PROBE` known to `transformers`. May be repeated."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for name in (PAGED, PROBE):
        ALL_ATTENTION_FUNCTIONS.register(name, attend)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **call: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `transformers` calls it: heads `(1, heads, T, head_dim)` in, `(1, T, num_heads, head_dim)` out.

    Raises AttributeError where the layer has no number.
    """
    query, key, value = (heads[0].transpose(0, 1) for heads in (query, key, value))  # (T, heads, head_dim) each
    mixed = running_step().attend(module.layer_idx, query, key, value, {**call, "attention_mask": attention_mask})
    return mixed[None], None
