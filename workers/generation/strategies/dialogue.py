"""Conversation with the turns of the session, through the model's chat template.

`is_careful` keeps a small model on a short rein; see `careful_sampling_for`.
"""

from __future__ import annotations

from schemas.request import Strategy
from workers.generation.strategies.conversation import history_of, system_of
from workers.generation.strategies.plan import Plan, StrategyContext, careful_sampling_for, sampling_for

SYSTEM = "You are a friendly, helpful assistant. Answer in a few short sentences."


class DialogueStrategy:
    """The model answers, knowing what was said before."""

    name = Strategy.DIALOGUE

    def __init__(self, *, is_careful: bool = True) -> None:
        self._is_careful = is_careful

    def plan(self, context: StrategyContext) -> Plan:
        """Return the conversation as a prompt; the oldest turns are left out where it would be too long."""
        prompt = context.prompter.chat(
            system=system_of(context.request, SYSTEM),
            history=history_of(context),
            compose=lambda _: context.request.last_user_text(),
            budget=context.prompter.budget(context.max_tokens),
        )
        return Plan(
            strategy=self.name,
            sampling=careful_sampling_for(context) if self._is_careful else sampling_for(context),
            prompt=prompt.token_ids,
            prompt_text=prompt.text,
        )
