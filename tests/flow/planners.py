"""Planners for the scripted engine: a chat template of our own, bytes as tokens; one that stands still when told."""

from __future__ import annotations

import asyncio
from typing import Any

from schemas.request import Strategy
from workers.generation.engine import Engine
from workers.generation.planning import Planner
from workers.generation.prompt import ChatTemplate, Prompter
from workers.generation.strategies import GenerationDefaults, TemplateBook

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)
GREETING = "Welcome! How can I help?"


def byte_planner() -> Planner:
    """Return a planner that works with every strategy and has one template."""

    def load(engine: Engine) -> Prompter:
        return Prompter(engine.tokenizer, ChatTemplate(TEMPLATE, {}), max_context=engine.identity.max_context)

    return Planner(
        load,
        templates=TemplateBook(texts={"greeting": {"en": GREETING}}),
        hints={"greeting": Strategy.TEMPLATE, "return_refund": Strategy.KNOWLEDGE},
        defaults=GenerationDefaults(),
    )


class HeldPlanner(Planner):
    """Makes `num_free` plans, and then holds."""

    num_free: int
    held: asyncio.Event

    async def plan(self, *args: Any) -> Any:
        if not self.num_free:
            self.held.set()
            await asyncio.Event().wait()
        self.num_free -= 1
        return await super().plan(*args)


def held_planner(num_free: int) -> HeldPlanner:
    planner = byte_planner()
    planner.__class__ = HeldPlanner
    assert isinstance(planner, HeldPlanner)
    planner.num_free, planner.held = num_free, asyncio.Event()
    return planner
