"""What the intent pool finds out about a request."""

from __future__ import annotations

import msgspec


class IntentResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Intent and what routing needs. `confidence` and `complexity` lie in 0 to 1; `language` is ISO 639-1."""

    intent: str
    confidence: float
    complexity: float = 0.0
    language: str = "en"
    needs_retrieval: bool = True
    alternatives: dict[str, float] = {}
    """The next likely intents with their probability."""
    model: str = ""
    """Name and hash of the weights; `request` where the client fixed the intent."""
    took_ms: float = 0.0
    failure: str = ""
    """Why the look-up was given up (an error code); the request goes on with `out_of_scope`."""
