"""An answer by a script, token by token: what a model and a sampler are to a real engine.

Knows one request, no engine and no time. The invariant: the tokens of an answer are those of the script, whatever an
earlier run has drawn of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from schemas.tokens import FinishReason, Usage
from workers.generation.engine.admission import bounded_max_tokens
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from workers.generation.engine.detokenizer import Detokenizer
from workers.generation.engine.protocol import ChoiceEnd, EngineRequest, Finished, TokenChunk

Script = Callable[[EngineRequest, int], str]
"""The text of each choice, by its index."""


class ScriptedChoice:
    """One answer as far as it has come; `end` once it is over."""

    def __init__(self, request: EngineRequest, index: int, text: str, max_context: int) -> None:
        self._index = index
        self._script = ByteTokenizer().encode(text)
        self._forced = request.output[index] if index < len(request.output) else ()
        self._num_prompt = len(request.prompt)
        self._max_tokens = bounded_max_tokens(request, max_context)
        self._stop_ids = request.sampling.stop_token_ids
        self._detokenizer = Detokenizer(request.sampling.stop)
        self.num_tokens = 0
        self.end: ChoiceEnd | None = None

    @property
    def length(self) -> int:
        """Return how many tokens a model would have in its cache."""
        return self._num_prompt + self.num_tokens

    def replay(self) -> list[TokenChunk]:
        """Return what an earlier run has drawn, up to its end."""
        chunks: list[TokenChunk] = []
        for token_id in self._forced:
            if self.end is None:
                chunks.append(self._take(token_id))
        return chunks

    def advance(self) -> TokenChunk:
        """Return the script's token at this position; after its last one, the end."""
        place = self.num_tokens
        return self._take(self._script[place] if place < len(self._script) else END_OF_SEQUENCE)

    def _take(self, token_id: int) -> TokenChunk:
        self.num_tokens += 1
        if token_id == END_OF_SEQUENCE or token_id in self._stop_ids:
            self._finish(FinishReason.STOP, token_id if token_id in self._stop_ids else None)
            return self._chunk(token_id, self._detokenizer.flush())
        text = self._detokenizer.push(ByteTokenizer().token_bytes(token_id))
        is_last = self.num_tokens >= self._max_tokens
        if is_last and self._detokenizer.matched is None:
            text += self._detokenizer.flush()
        if self._detokenizer.matched is not None:
            self._finish(FinishReason.STOP, self._detokenizer.matched)
        elif is_last:
            self._finish(FinishReason.LENGTH)
        return self._chunk(token_id, text)

    def abort(self) -> None:
        """End it here, if it has not ended."""
        if self.end is None:
            self._finish(FinishReason.ABORT)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.end = ChoiceEnd(
            index=self._index, finish_reason=reason, num_tokens=self.num_tokens, stop_reason=stop_reason
        )

    def _chunk(self, token_id: int, text: str) -> TokenChunk:
        return TokenChunk(index=self._index, text=text, token_ids=(token_id,))


def finished(request: EngineRequest, choices: Sequence[ScriptedChoice]) -> Finished:
    """Return the end of a request whose choices have all ended."""
    usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=sum(choice.num_tokens for choice in choices))
    return Finished(choices=tuple(choice.end for choice in choices if choice.end is not None), usage=usage)
