"""Chinese words into English ones, so that an English encoder finds its way in a Chinese question.

A gloss is no translation: word for word, in Chinese order, unknown words left out. It is enough for a sentence
vector to land near that of the English question: on held-out folds of the demo's training texts it lifts the accuracy
on Chinese from 0.46 to 0.80. Segmentation is by longest match in `glossary.tsv`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

_FILE = Path(__file__).parent / "glossary.tsv"
_HAN = re.compile(r"[\u3400-\u9fff]")


@cache
def load_glossary() -> Mapping[str, str]:
    """Return Chinese word -> English words, read once. Blocking."""
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t", 1) for line in lines if line and not line.startswith("#"))


@cache
def glossary_sha256() -> str:
    """Return the hash of the file: heads are trained on one glossary."""
    return hashlib.sha256(_FILE.read_bytes()).hexdigest()


def gloss(text: str) -> str:
    """Return `text` with its Chinese words in English; a text without Chinese comes back as it is."""
    if not _HAN.search(text):
        return text
    glossary = load_glossary()
    longest = max(map(len, glossary))
    pieces: list[str] = []
    start = 0
    while start < len(text):
        word = next(
            (
                text[start:end]
                for end in range(min(start + longest, len(text)), start, -1)
                if text[start:end] in glossary
            ),
            None,
        )
        if word is not None:
            pieces.append(f" {glossary[word]} ")
        elif not _HAN.match(text[start]):
            pieces.append(text[start])
        start += len(word or text[start])
    return " ".join("".join(pieces).split())
