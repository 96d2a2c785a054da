"""Texts for the engine that follows a script: hard to cut, and the same in every process.

The invariant: a text is a function of the prompt's tokens, the seed and the choice's index alone, so that whoever has
these three knows what an undisturbed run says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from schemas.errors import ConfigError
from workers.generation.engine.protocol import EngineRequest
from workers.generation.engine.scripted_choice import Script

PLAIN = "the shop opens at nine and closes at seven; returns are free within thirty days: please keep your receipt"
OTHER = (
    "🌶️ 👨‍👩‍👧 👍🏽 🇨🇭 你好 世界 退货 鞋子 三十天 e\u0301te\u0301 n\u0303u\u0308 Grüße café Ελλάδα привет नमस्ते 한국어"
)
WORDS = tuple(f"{PLAIN} {OTHER}".split())
SENTENCE_WORDS = 9  # one sentence in nine words, on average


def seeded_text(
    prompt: Sequence[int], seed: int, index: int = 0, *, min_tokens: int = 20, max_tokens: int = 200
) -> str:
    """Return a text of between about `min_tokens` and `max_tokens` bytes, with characters of one to 25 bytes."""
    if not 1 <= min_tokens <= max_tokens:
        raise ConfigError(f"min_tokens: {min_tokens} is not between 1 and max_tokens ({max_tokens})")
    key = f"{seed}/{index}/{','.join(map(str, prompt))}".encode()
    draws = hashlib.shake_256(key).digest(4 + 2 * max_tokens)
    length = min_tokens + int.from_bytes(draws[:4]) % (max_tokens - min_tokens + 1)
    words: list[str] = []
    for word, mark in zip(draws[4::2], draws[5::2], strict=True):
        words.append(WORDS[word % len(WORDS)] + ("." if mark < 256 // SENTENCE_WORDS else ""))
        length -= len(words[-1].encode()) + 1
        if length <= 0:
            break
    return " ".join(words)


def seeded_script(*, min_tokens: int = 20, max_tokens: int = 200) -> Script:
    """Return the script that answers each choice with its `seeded_text`. Raises ConfigError for an empty range."""
    seeded_text((), 0, min_tokens=min_tokens, max_tokens=max_tokens)

    def script(request: EngineRequest, index: int) -> str:
        return seeded_text(request.prompt, request.sampling.seed, index, min_tokens=min_tokens, max_tokens=max_tokens)

    return script
