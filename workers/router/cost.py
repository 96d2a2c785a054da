"""What a request will cost in tokens, estimated before any tokenizer has seen it. Pure."""

from __future__ import annotations

from schemas.request import GenerationRequest

SMOOTHING = 0.95
BYTES_PER_TOKEN = 3
"""English has about 4 bytes to a token, Chinese 3 bytes to a character and little more than a token to each; a
tokenizer per model would be exact and would tie the door to the weights. Shares and limits only compare estimates."""


class MeanTokens:
    """What a request costs on average; late ones count for more. `value` is 0 before the first."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, tokens: int) -> None:
        """Take one more request in."""
        self.value += (1 - SMOOTHING) * (tokens - self.value) if self.value else tokens


def estimate_tokens(request: GenerationRequest, *, max_length: int) -> int:
    """Return the tokens of prompt and output at most: what a fair share and the room in the pool are counted in.

    Passages that are looked up and remembered turns are not known yet and not counted.
    """
    texts = [request.prompt or "", request.system or ""]
    texts += [message.content for message in request.messages or ()]
    texts += [passage.text for passage in request.passages or ()]
    num_bytes = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return num_bytes // BYTES_PER_TOKEN + (request.max_tokens or max_length) * (request.n or 1)
