"""The tokenizer of a model folder: text to ids with control tokens under our control, ids to bytes.

Knows `tokenizer.json` and the end-of-sequence ids, no chat template. Byte-level BPE only (SmolLM2, Llama 3, Qwen): each
token there is a fixed string of bytes, so that streams can be cut between tokens safely. The invariant: no text given
to `encode` ever becomes a control token.
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


class BytePairTokenizer:
    """A `Tokenizer` over a `tokenizer.json` with a byte-level decoder."""

    def __init__(self, native: NativeTokenizer, *, eos_token_ids: frozenset[int], content_hash: str) -> None:
        self._native = native
        self._native.encode_special_tokens = True  # "special tokens off": their names are split like any text
        self.eos_token_ids = eos_token_ids
        self.content_hash = content_hash
        added = native.get_added_tokens_decoder()
        self._control = {token.content: token_id for token_id, token in added.items() if token.special}
        names = sorted(self._control, key=len, reverse=True)  # the longest name wins
        self._control_pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._bytes = _token_bytes(native, frozenset(self._control.values()))

    @classmethod
    def load(cls, folder: Path) -> BytePairTokenizer:
        """Read `tokenizer.json` and the end-of-sequence ids of `config.json` and `generation_config.json`.

        Raises ConfigError if the tokenizer is missing or of another family.
        """
        path = folder / "tokenizer.json"
        try:
            content = path.read_bytes()
            native = NativeTokenizer.from_buffer(content)
            decoder = json.loads(content).get("decoder") or {}
        except Exception as error:  # the tokenizers package raises bare Exception
            raise ConfigError(f"generation.model: cannot read {path}: {error}") from error
        if decoder.get("type") != "ByteLevel":
            raise ConfigError(
                f"generation.model: {path}: decoder {decoder.get('type')!r} is not known here, only ByteLevel"
            )
        native.no_truncation()
        native.no_padding()
        return cls(native, eos_token_ids=_eos_token_ids(folder), content_hash=hashlib.sha256(content).hexdigest())

    @property
    def vocabulary_size(self) -> int:
        """Return the number of ids, control tokens included."""
        return len(self._bytes)

    def control_id(self, name: str) -> int | None:
        """Return the id of a control token, None if there is none of that name."""
        return self._control.get(name)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of text by anybody. Lone surrogates become U+FFFD."""
        return tuple(self._native.encode(_valid(text), add_special_tokens=False).ids)

    def encode_control(self, text: str) -> tuple[int, ...]:
        """Return the ids of text of ours, in which names of control tokens become control tokens."""
        if self._control_pattern is None:
            return self.encode(text)
        ids: list[int] = []
        place = 0
        for match in self._control_pattern.finditer(text):
            ids.extend(self.encode(text[place : match.start()]))
            ids.append(self._control[match.group()])
            place = match.end()
        ids.extend(self.encode(text[place:]))
        return tuple(ids)

    def count(self, text: str) -> int:
        """Return the number of tokens of `encode`."""
        return len(self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without control tokens."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to the text."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""


def byte_alphabet() -> dict[str, int]:
    """Return the printable character that stands for each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(moved)}


def _token_bytes(native: NativeTokenizer, control: frozenset[int]) -> list[bytes]:
    alphabet = byte_alphabet()
    vocabulary: dict[str, int] = native.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in control:
            continue
        known = all(character in alphabet for character in token)
        table[token_id] = bytes(alphabet[character] for character in token) if known else token.encode()
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
