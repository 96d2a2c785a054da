"""How fast an engine is now: a few tokens that nobody reads.

For a worker that stands aside because it was slower than its peers; its engine has nothing else to do.
"""

from __future__ import annotations

import time
from uuid import uuid4

from workers.generation.engine import Engine, EngineRequest, SamplingParams, TokenChunk

PROMPT = "The quick brown fox"
NUM_TOKENS = 16


async def probe_engine(engine: Engine) -> float | None:
    """Return milliseconds per token, None if the engine ended before its second one. Raises what the engine raises."""
    request = EngineRequest(
        request_id=f"probe-{uuid4().hex}",
        prompt=engine.tokenizer.encode(PROMPT),
        sampling=SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0),
    )
    began_s = last_s = 0.0
    num_tokens = 0
    try:
        async for event in engine.submit(request):
            if isinstance(event, TokenChunk):
                last_s = time.perf_counter()
                began_s = began_s or last_s  # from the first token on: the prompt is no step like the others
                num_tokens += 1
    finally:
        engine.abort(request.request_id)
    return (last_s - began_s) * 1000 / (num_tokens - 1) if num_tokens > 1 else None
