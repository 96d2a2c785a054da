"""What a text is made from, and the claim that says so to whoever may have to go on with it.

Knows plans, turns and claims; does nothing itself. Two beginnings with equal identity and fingerprint have one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from schemas.tokens import Claim
from streams.claims import StreamView
from streams.session import Turn
from workers.generation.engine import EngineIdentity
from workers.generation.strategies import Plan

MAX_MEMORY_BYTES = 262_144  # a quarter of a Kafka record; more is left out, and who takes over may have to begin anew


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """What a run begins with: its plan, why its strategy, and the turns that the prompt was made with."""

    plan: Plan
    reason: str
    turns: Sequence[Turn]
    fingerprint: str

    def claim(self, identity: EngineIdentity, view: StreamView) -> Claim:
        """Return the claim of a run that writes on where `view` ends."""
        memory = tuple((turn.user, turn.assistant) for turn in self.turns)
        size = sum(len(text.encode()) for pair in memory for text in pair)
        return msgspec.structs.replace(
            claim_of(identity),
            from_seq=tuple(view.next_seq(index) for index in range(self.plan.sampling.n)),
            plan=self.fingerprint,
            memory=memory if size <= MAX_MEMORY_BYTES else (),
        )


def claim_of(identity: EngineIdentity) -> Claim:
    """Return the claim of a run on an engine, before it has a plan."""
    return Claim(
        model=identity.weights_hash,
        tokenizer=identity.tokenizer_hash,
        precision=identity.precision,
        engine=identity.engine,
    )


def draws_alike(origin: Claim, identity: EngineIdentity) -> bool:
    """Return whether an engine draws the tokens that the run of a claim would have drawn from the same plan."""
    ours = claim_of(identity)
    return all(getattr(origin, name) == getattr(ours, name) for name in ("model", "tokenizer", "precision", "engine"))


def remembered(origin: Claim) -> tuple[Turn, ...]:
    """Return the turns that a claim tells of."""
    return tuple(Turn(request_id="", user=user, assistant=assistant) for user, assistant in origin.memory)
