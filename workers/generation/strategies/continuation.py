"""The model goes on with a text as it stands: no chat template, no history, no instructions."""

from __future__ import annotations

from schemas.request import Strategy
from workers.generation.strategies.plan import Plan, StrategyContext, careful_sampling_for, sampling_for


class ContinuationStrategy:
    """The prompt is the beginning of the text."""

    name = Strategy.CONTINUATION

    def __init__(self, *, is_careful: bool = True) -> None:
        self._is_careful = is_careful

    def plan(self, context: StrategyContext) -> Plan:
        """Return the text as a prompt. Raises PromptTooLongError: a text cannot be shortened without changing it."""
        budget = context.prompter.budget(context.max_tokens)
        prompt = context.prompter.raw(context.request.last_user_text(), budget=budget)
        return Plan(
            strategy=self.name,
            sampling=careful_sampling_for(context) if self._is_careful else sampling_for(context),
            prompt=prompt.token_ids,
            prompt_text=prompt.text,
        )
