"""How the tokens of a `tokenizer.json` stand for bytes, told by its parts.

Knows the JSON of the `tokenizers` package, no texts. Two forms: byte-level, where a printable character stands for each
byte, and that of SentencePiece, where ▁ stands for a space and `<0xNN>` for a byte. Others are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import ConfigError

SPACE = "\u2581"  # ▁
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SENTENCE_PIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}  # parts of a decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenForm:
    """`has_prefix`: a text begins with a space that is not its own; `has_prefix_after_control`: also behind a control
    token. `alphabet` maps characters to bytes in byte-level models, and is None after SentencePiece.
    """

    alphabet: Mapping[str, int] | None
    has_byte_tokens: bool = False
    has_prefix: bool = False
    has_prefix_after_control: bool = False

    def to_bytes(self, token: str) -> bytes:
        """Return the bytes that a token stands for."""
        if self.alphabet is not None:
            known = all(character in self.alphabet for character in token)
            return bytes(self.alphabet[character] for character in token) if known else token.encode()
        match = BYTE.fullmatch(token) if self.has_byte_tokens else None
        return bytes([int(match[1], 16)]) if match else token.replace(SPACE, " ").encode()


def read_form(raw: Mapping[str, Any]) -> TokenForm:
    """Return the form of a tokenizer. Raises ConfigError for one of another kind."""
    kind = (raw.get("model") or {}).get("type", "BPE")
    if kind != "BPE":
        raise ConfigError(f"a model {kind!r} is not known here, only BPE")
    decoder = raw.get("decoder") or {}
    kinds = {part.get("type") for part in _parts(decoder, "decoders")}
    if kinds == {"ByteLevel"}:
        return TokenForm(alphabet=byte_alphabet())
    if not kinds or not kinds <= SENTENCE_PIECE or not _has_spaces(decoder):
        raise ConfigError(f"a decoder {decoder.get('type')!r} of {sorted(map(str, kinds))} is not known here")
    prefixes = [_prefix(part) for part in _prefixing(raw)]
    return TokenForm(
        alphabet=None,
        has_byte_tokens="ByteFallback" in kinds,
        has_prefix=any(prefixes),
        has_prefix_after_control="always" in prefixes,
    )


def without_prefix(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same tokenizer for texts that stand behind others: it puts no space before them."""
    bare = {**raw, "normalizer": _without_prepend(raw.get("normalizer"))}
    if raw.get("pre_tokenizer"):
        bare["pre_tokenizer"] = _never(raw["pre_tokenizer"])
    return bare


def byte_alphabet() -> dict[str, int]:
    """Return the printable character that stands for each byte in byte-level BPE (GPT-2's `bytes_to_unicode`)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(moved)}


def _parts(whole: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a sequence, or the one that it is."""
    if whole and whole.get("type") == "Sequence":
        for part in whole[name]:
            yield from _parts(part, name)
    elif whole:
        yield whole


def _has_spaces(decoder: Mapping[str, Any]) -> bool:
    """Say whether a decoder replaces ▁ by a space, nothing else, and strips no more than the first space."""
    is_replacing = False
    for part in _parts(decoder, "decoders"):
        if part["type"] == "Metaspace":
            is_replacing = part.get("replacement", SPACE) == SPACE
        if part["type"] == "Replace":
            if part.get("pattern") != {"String": SPACE} or part.get("content") != " ":
                return False
            is_replacing = True
        if part["type"] == "Strip" and (part.get("content"), part.get("start"), part.get("stop")) != (" ", 1, 0):
            return False
    return is_replacing


def _prefixing(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from _parts(raw.get("normalizer"), "normalizers")
    yield from _parts(raw.get("pre_tokenizer"), "pretokenizers")


def _prefix(part: Mapping[str, Any]) -> str:
    """Return when a part of a tokenizer puts a space before a text: `always`, only the `first`, or empty for never."""
    if part["type"] == "Prepend" and part.get("prepend") in (SPACE, " "):
        return "always"
    if part["type"] != "Metaspace":
        return ""
    scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space", True) else "never")
    return "" if scheme == "never" else str(scheme)


def _without_prepend(normalizer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    parts = [part for part in _parts(normalizer, "normalizers") if not _prefix(part)]
    return {"type": "Sequence", "normalizers": parts} if parts else None


def _never(pre_tokenizer: Mapping[str, Any]) -> Mapping[str, Any]:
    if pre_tokenizer["type"] == "Sequence":
        return {**pre_tokenizer, "pretokenizers": [_never(part) for part in pre_tokenizer["pretokenizers"]]}
    if pre_tokenizer["type"] == "Metaspace":
        return {**pre_tokenizer, "prepend_scheme": "never", "add_prefix_space": False}
    return pre_tokenizer
