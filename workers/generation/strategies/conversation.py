"""The parts of a conversation that strategies share: instructions, and the turns before the question."""

from __future__ import annotations

from schemas.request import GenerationRequest, Message, Role
from workers.generation.strategies.plan import StrategyContext


def system_of(request: GenerationRequest, default: str) -> str:
    """Return the instructions: the request's own, with the system messages it sends, else the strategy's."""
    sent = [message.content for message in request.messages or () if message.role is Role.SYSTEM]
    return "\n\n".join([*([request.system] if request.system else []), *sent]) or default


def history_of(context: StrategyContext) -> list[Message]:
    """Return what was said before the question: the session's turns, then the messages that the request sends."""
    turns = [
        message
        for turn in context.history
        for message in (
            Message(role=Role.USER, content=turn.user),
            Message(role=Role.ASSISTANT, content=turn.assistant),
        )
    ]
    sent = [message for message in context.request.messages or () if message.role is not Role.SYSTEM]
    return turns + sent[:-1]
