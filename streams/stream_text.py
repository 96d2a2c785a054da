"""The text of one choice, as a reader has it (`ChoiceText`, `Run`) and as a writer gathers it (`PendingChoice`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from schemas.errors import InternalError
from schemas.tokens import Choice, Claim, End, Epoch, Kind, TokenLogprob, TokenRecord


@dataclass(slots=True)
class ChoiceText:
    """Text and tokens of one choice. `marks` maps each number of tokens where a record ended to its characters.

    `origin` is the claim of the run that began the text, if that run has described it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    marks: dict[int, int] = field(default_factory=lambda: {0: 0})
    origin: Claim | None = None

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.token_ids

    def append(self, record: TokenRecord) -> None:
        self.text += record.text
        self.token_ids.extend(record.token_ids)
        self.logprobs.extend(record.logprobs or ())
        self.mark()

    def mark(self) -> None:
        self.marks[len(self.token_ids)] = len(self.text)

    def cut(self, num_tokens: int) -> ChoiceText:
        """Return a copy of the first `num_tokens` tokens."""
        length = self.marks[num_tokens]
        marks = {at: chars for at, chars in self.marks.items() if at <= num_tokens}
        logprobs = self.logprobs[:num_tokens] if len(self.logprobs) == len(self.token_ids) else []
        return ChoiceText(self.text[:length], self.token_ids[:num_tokens], logprobs, marks, self.origin)

    def same_as(self, other: ChoiceText) -> bool:
        return self.text == other.text and self.token_ids == other.token_ids

    def agrees_with(self, other: ChoiceText) -> bool:
        """Return whether one could be the beginning of the other."""
        chars = min(len(self.text), len(other.text))
        tokens = min(len(self.token_ids), len(other.token_ids))
        return self.text[:chars] == other.text[:chars] and self.token_ids[:tokens] == other.token_ids[:tokens]


@dataclass(slots=True)
class Run:
    """What the owner of the current claim has written: per choice its text, and the tokenless records since a token.

    `origin` is its claim once it has described what its text is made from.
    """

    epoch: Epoch
    owner: str
    origin: Claim | None = None
    texts: dict[int, ChoiceText] = field(default_factory=dict)
    tokenless: dict[int, set[Kind]] = field(default_factory=dict)

    def num_tokens(self) -> int:
        return sum(len(text.token_ids) for text in self.texts.values())


@dataclass(slots=True)
class PendingChoice:
    """One choice of a run: what is written (`num_tokens`, `digest`) and what waits."""

    num_tokens: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    is_first_text_out: bool = False
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def is_urgent(self) -> bool:
        return bool(self.text and self.token_ids and not self.is_first_text_out)

    def take(self) -> tuple[str, tuple[int, ...], tuple[TokenLogprob, ...] | None]:
        taken = self.text, tuple(self.token_ids), tuple(self.logprobs) or None
        self.digest.update(self.text.encode())
        self.num_tokens += len(self.token_ids)
        self.is_first_text_out = self.is_first_text_out or bool(self.text)
        self.text, self.token_ids, self.logprobs = "", [], []
        return taken

    def written(self) -> PendingChoice:
        """Return a copy of what is written, without what waits."""
        return PendingChoice(self.num_tokens, self.digest.copy(), self.is_first_text_out)


def filled(end: End, choices: Mapping[int, PendingChoice], num_records: int) -> End:
    """Return an end with what is written of each choice, its number of records and its tokens filled in."""
    reasons = {choice.index: choice.finish_reason for choice in end.choices}
    written = tuple(
        Choice(
            index=index,
            finish_reason=reasons.get(index, end.finish_reason),
            num_tokens=choice.num_tokens,
            sha256=choice.digest.hexdigest(),
        )
        for index, choice in sorted(choices.items())
    )
    num_tokens = sum(choice.num_tokens for choice in choices.values())
    return msgspec.structs.replace(
        end,
        num_records=num_records,
        usage=msgspec.structs.replace(end.usage, completion_tokens=num_tokens),
        sha256=(choices.get(0) or PendingChoice()).digest.hexdigest(),
        choices=written if len(written) > 1 else (),
    )


def check_text(text: str) -> None:
    """Refuse text that cannot be UTF-8 (lone surrogates). Raises InternalError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InternalError(f"text with a lone surrogate at character {error.start}") from error
