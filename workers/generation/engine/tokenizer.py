"""The tokenizer of a model: text to ids with control tokens under our control, ids to bytes.

Knows `tokenizer.json` and the end-of-sequence ids, no chat template. Byte-pair models of both kinds: byte-level
(SmolLM2, Llama 3, Qwen) and after SentencePiece (Llama 2, Mistral, TinyLlama). Each token is a fixed string of bytes in
both, so that streams can be cut between tokens safely. The invariant: no text given to `encode` ever becomes a control
token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer

from schemas.errors import ConfigError
from workers.generation.engine.tokenizer_form import TokenForm, byte_alphabet, read_form, without_prefix

__all__ = ["BytePairTokenizer", "byte_alphabet"]


class BytePairTokenizer:
    """A `Tokenizer` over the content of a `tokenizer.json`."""

    def __init__(self, content: bytes, *, eos_token_ids: frozenset[int]) -> None:
        """Raise ConfigError for a kind of tokenizer whose tokens are no fixed strings of bytes."""
        self.eos_token_ids = eos_token_ids
        self.content_hash = hashlib.sha256(content).hexdigest()
        raw: dict[str, Any] = json.loads(content)
        self._form = read_form(raw)
        self._native = _native(content)
        self._bare = _native(json.dumps(without_prefix(raw)).encode()) if self._form.has_prefix else self._native
        added = self._native.get_added_tokens_decoder()
        self._control = {token.content: token_id for token_id, token in added.items() if token.special}
        names = sorted(self._control, key=len, reverse=True)  # the longest name wins
        self._control_pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._bytes = _token_bytes(self._native, self._form, frozenset(self._control.values()))
        self._refuse_leaks()

    @classmethod
    def load(cls, folder: Path) -> BytePairTokenizer:
        """Read `tokenizer.json` and the end-of-sequence ids of `config.json` and `generation_config.json`.

        Raises ConfigError if the tokenizer is missing or of another kind.
        """
        path = folder / "tokenizer.json"
        try:
            return cls(path.read_bytes(), eos_token_ids=_eos_token_ids(folder))
        except ConfigError as error:
            raise ConfigError(f"generation.model: {path}: {error.message}") from error
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ConfigError(f"generation.model: cannot read {path}: {error}") from error

    @property
    def vocabulary_size(self) -> int:
        """Return the number of ids, control tokens included."""
        return len(self._bytes)

    def control_id(self, name: str) -> int | None:
        """Return the id of a control token, None if there is none of that name."""
        return self._control.get(name)

    def encode(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the ids of text by anybody. Lone surrogates become U+FFFD.

        `is_start`: nothing stands before the text. SentencePiece has a space there that is not in the text.
        """
        native = self._native if is_start else self._bare
        return tuple(native.encode(_valid(text), add_special_tokens=False).ids)

    def encode_control(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the ids of text of ours, in which names of control tokens become control tokens."""
        if self._control_pattern is None:
            return self.encode(text, is_start=is_start)
        ids: list[int] = []
        place = 0
        for match in self._control_pattern.finditer(text):
            ids.extend(self.encode(text[place : match.start()], is_start=is_start))
            ids.append(self._control[match.group()])
            place, is_start = match.end(), self._form.has_prefix_after_control
        ids.extend(self.encode(text[place:], is_start=is_start))
        return tuple(ids)

    def count(self, text: str) -> int:
        """Return the number of tokens of `encode`."""
        return len(self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without control tokens, and without the space that SentencePiece has put before it."""
        text = b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._form.has_prefix else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text that has begun."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def _refuse_leaks(self) -> None:
        """Make sure of the invariant: a vocabulary could hold the names of control tokens as ordinary text too."""
        forbidden = frozenset(self._control.values())
        for name in self._control:
            if not forbidden.isdisjoint(self.encode(name)):
                raise ConfigError(f"{name!r} within a text would become a control token")


def _native(content: bytes) -> NativeTokenizer:
    native = NativeTokenizer.from_buffer(content)
    native.no_truncation()
    native.no_padding()
    native.encode_special_tokens = True  # "special tokens off": their names are split like any text
    return native


def _token_bytes(native: NativeTokenizer, form: TokenForm, control: frozenset[int]) -> list[bytes]:
    vocabulary: dict[str, int] = native.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id not in control:
            table[token_id] = form.to_bytes(token)
    return table


def _valid(text: str) -> str:
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _eos_token_ids(folder: Path) -> frozenset[int]:
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        found: Any = json.loads(path.read_bytes()).get("eos_token_id") if path.exists() else None
        ids.update([found] if isinstance(found, int) else found or [])
    return frozenset(ids)
