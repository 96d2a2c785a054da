"""What the sampler keeps of one choice: its settings, and the earlier tokens that its penalties look at.

Knows ids and numbers, no logits. The invariant: what `note` was told and the prompt are all that the state depends on,
so that a choice which another run has begun goes on as if this one had drawn it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from workers.generation.engine.protocol import SamplingParams

MIN_DIVISOR = 1e-30  # below, a logit over it leaves the range of fp32
MAX_SHIFT = 1e30  # above, sums of shifts do; no logit is of that size


class SamplerState:
    """One choice. Penalties need the ids that have occurred, not the vocabulary: they cost what was said, no more."""

    __slots__ = ("_prompt", "_seen", "bias", "bias_ids", "counted", "counts", "index", "native", "params", "vocab_size")

    def __init__(self, params: SamplingParams, prompt: Sequence[int], *, index: int, vocab_size: int) -> None:
        self.params = params
        self.index = index
        self.vocab_size = vocab_size
        self.counted: dict[int, int] = {}
        """The place of each id of the output in `counts`; filled only where a penalty asks for it."""
        self.counts = array("f")
        self.native: object = None
        """What the compiled sampler keeps with a state."""
        bias = {token_id: value for token_id, value in params.logit_bias.items() if 0 <= token_id < vocab_size}
        self.bias_ids = array("i", bias)
        self.bias = array("f", map(bounded, bias.values()))
        self._prompt = prompt
        self._seen: dict[int, None] | None = None

    @property
    def seen(self) -> dict[int, None]:
        """Return the ids of prompt and output, each once; empty without a repetition penalty."""
        if self._seen is None:
            has_penalty = self.params.repetition_penalty != 1.0
            self._seen = dict.fromkeys(i for i in self._prompt if 0 <= i < self.vocab_size) if has_penalty else {}
        return self._seen

    def note(self, token_id: int) -> None:
        """Count a token of the output, whoever has drawn it."""
        params = self.params
        if params.repetition_penalty != 1.0:
            self.seen[token_id] = None
        if params.presence_penalty or params.frequency_penalty:
            place = self.counted.setdefault(token_id, len(self.counts))
            if place == len(self.counts):
                self.counts.append(0.0)
            self.counts[place] += 1


def bounded(shift: float) -> float:
    """Return a shift of a logit, cut to what sums of shifts can bear."""
    return max(-MAX_SHIFT, min(MAX_SHIFT, shift))
