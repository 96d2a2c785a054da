"""What a reader sees of a token stream, step by step: the events that `streams.claims` makes of its records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from schemas.tokens import End, See, TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class TextAppended:
    """Text and tokens to add to choice `index`."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRetracted:
    """The last characters of choice `index`, withdrawn; its tokens stay counted."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReset:
    """All text of choice `index` so far is void."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded:
    """The effective end."""

    end: End


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSeen:
    """The request is a repeat, its stream stands at `see`. Only passed on while no claim has counted here."""

    see: See


Event: TypeAlias = TextAppended | TextRetracted | StreamReset | StreamEnded | StreamSeen
