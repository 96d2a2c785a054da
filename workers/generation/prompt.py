"""Conversations to prompt tokens, through the model's own chat template.

Knows templates and the tokenizer, no strategies. The invariant: only the template's own text can become control tokens;
what users, passages, sessions and callers say is encoded apart, with special tokens off, whatever it contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from schemas.errors import ConfigError, PromptTooLongError
from schemas.request import Message, Role
from schemas.retrieval import Passage
from workers.generation.engine.protocol import Tokenizer

_MARK = re.compile("\x02([0-9]+)\x03")  # stands for the text of one message while the template is rendered
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
Compose = Callable[[Sequence[Passage]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A finished prompt. `passages` are those that stayed in; `text` is for people, control tokens by name."""

    token_ids: tuple[int, ...]
    text: str
    passages: tuple[Passage, ...] = ()


class ChatTemplate:
    """The Jinja template of a model folder, in a sandbox, with the names that transformers gives it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"generation.model: the chat template is broken: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Read `chat_template.jinja`, `tokenizer_config.json` or a GGUF file. Raises ConfigError without a template."""
        from workers.generation.engine.model_folder import chat_template  # brings torch

        if (found := chat_template(folder)) is not None:
            return cls(*found)
        config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config: dict[str, Any] = json.loads(config_path.read_bytes()) if config_path.exists() else {}
        source = template_path.read_text("utf-8") if template_path.exists() else config.get("chat_template")
        if not isinstance(source, str):
            raise ConfigError(f"generation.model: {folder} has no chat template")
        named = {name: config.get(name) for name in _SPECIAL_NAMES}
        tokens = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
        return cls(source, {name: token for name, token in tokens.items() if isinstance(token, str)})

    def render(self, messages: Sequence[Message]) -> list[tuple[str, bool]]:
        """Return the conversation in pieces: text, and whether it is the template's own."""
        marked = [{"role": message.role.value, "content": f"\x02{place}\x03"} for place, message in enumerate(messages)]
        try:
            rendered = self._template.render(messages=marked, add_generation_prompt=True, **self._special_tokens)
        except TemplateError as error:
            raise ConfigError(f"generation.model: the chat template refuses a conversation: {error}") from error
        pieces = _MARK.split(rendered)  # own text, number, own text, number, …
        return [
            (messages[int(piece)].content if place % 2 else piece, place % 2 == 0) for place, piece in enumerate(pieces)
        ]


class Prompter:
    """Makes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, max_context: int) -> None:
        self.tokenizer = tokenizer
        self.max_context = max_context
        self._template = template

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer, *, max_context: int) -> Prompter:
        """Read the chat template of a model folder. Raises ConfigError."""
        return cls(tokenizer, ChatTemplate.load(folder), max_context=max_context)

    def budget(self, max_tokens: int) -> int:
        """Return how long a prompt may be: a quarter of the context, or `max_tokens` if less, is left to the answer."""
        return self.max_context - max(1, min(max_tokens, self.max_context // 4))

    def raw(self, text: str, *, budget: int) -> Prompt:
        """Return text as a prompt without template. Raises PromptTooLongError."""
        token_ids = self.tokenizer.encode(text)
        _check(len(token_ids), budget)
        return Prompt(token_ids=token_ids, text=text)

    def chat(
        self,
        *,
        system: str,
        history: Sequence[Message],
        passages: Sequence[Passage] = (),
        compose: Compose,
        budget: int,
    ) -> Prompt:
        """Return a conversation that ends where the answer begins; `compose` writes the last message from passages.

        What does not fit is left out: the oldest turns first, then the weakest (last) passages. The system prompt and
        the question stay. Raises PromptTooLongError if they alone do not fit.
        """
        turns, kept = list(history), list(passages)
        known: dict[str, tuple[int, ...]] = {}
        while True:
            first = [Message(role=Role.SYSTEM, content=system)] if system else []
            messages = [*first, *turns, Message(role=Role.USER, content=compose(kept))]
            token_ids, text = self._encode(messages, known)
            if len(token_ids) <= budget:
                return Prompt(token_ids=token_ids, text=text, passages=tuple(kept))
            if turns:
                said = sum(len(known.get(message.content, ())) for message in messages)
                around = (len(token_ids) - said) // len(messages) + 1  # the template's tokens of each, rounded up
                turns = _without_oldest(turns, len(token_ids) - budget, known, around)
            elif kept:
                kept.pop()
            else:
                _check(len(token_ids), budget)

    def _encode(self, messages: Sequence[Message], known: dict[str, tuple[int, ...]]) -> tuple[tuple[int, ...], str]:
        """Encode each piece by its origin; `known` remembers texts between the attempts of one prompt."""
        token_ids: list[int] = []
        shown: list[str] = []
        for text, is_control in self._template.render(messages):
            if is_control:
                token_ids.extend(self.tokenizer.encode_control(text, is_start=not shown))
            else:
                known[text] = known[text] if text in known else self.tokenizer.encode(text, is_start=False)
                token_ids.extend(known[text])
            shown.append(text)
        return tuple(token_ids), "".join(shown)


def _without_oldest(
    turns: Sequence[Message], excess: int, known: Mapping[str, tuple[int, ...]], around: int
) -> list[Message]:
    """Drop the oldest messages until `excess` tokens are gone; what remains starts with a user."""
    left = list(turns)
    while left and (excess > 0 or left[0].role is not Role.USER):
        excess -= len(known.get(left.pop(0).content, ())) + around
    return left


def _check(num_tokens: int, budget: int) -> None:
    if num_tokens > budget:
        raise PromptTooLongError(
            f"prompt: {num_tokens} tokens do not fit: at most {budget} are allowed", field="prompt"
        )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
