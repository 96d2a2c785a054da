"""Lengthens a choice by a token: tells its reader, and says when it is the last one.

Knows texts and stop conditions, no blocks or logits. The invariant: what is published does not depend on who drew the
token: this run, or an earlier one whose output is given.
"""

from __future__ import annotations

from schemas.tokens import FinishReason, TokenLogprob
from workers.generation.engine.protocol import TokenChunk, Tokenizer
from workers.generation.engine.sequence import Sequence


class OutputWriter:
    """Appends tokens to sequences and publishes them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = tokenizer.eos_token_ids

    def append(self, sequence: Sequence, token_id: int, logprob: TokenLogprob | None = None) -> None:
        """Lengthen a choice by a token, publish it, and end the choice where it is the last one.

        Raises ValueError for a token that the choice's constraint does not allow.
        """
        sequence.tokens.append(token_id)
        sequence.sampler.note(token_id)
        text = self._text(sequence, token_id)
        sequence.request.emit(
            TokenChunk(
                index=sequence.index,
                text=text,
                token_ids=(token_id,),
                logprobs=None if logprob is None else (logprob,),
            )
        )

    def replay(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Publish what an earlier run has drawn, up to the end of the choice."""
        for token_id in token_ids:
            if sequence.end is not None:
                return
            self.append(sequence, token_id)

    def _text(self, sequence: Sequence, token_id: int) -> str:
        """Return what the token lets out, and end the choice where it is the last one."""
        sampling, detokenizer = sequence.request.request.sampling, sequence.detokenizer
        if token_id in sampling.stop_token_ids:
            sequence.finish(FinishReason.STOP, token_id)
            return detokenizer.flush()
        if token_id in self._eos_token_ids:
            sequence.finish(FinishReason.STOP)
            return detokenizer.flush()
        is_whole = _is_whole(sequence, token_id)
        text = detokenizer.push(self._tokenizer.token_bytes(token_id))
        is_last = is_whole or sequence.num_output >= sequence.request.max_tokens
        if is_last and detokenizer.matched is None:
            text += detokenizer.flush()
        if detokenizer.matched is not None:
            sequence.finish(FinishReason.STOP, detokenizer.matched)
        elif is_last:
            sequence.finish(FinishReason.STOP if is_whole else FinishReason.LENGTH)
        return text


def _is_whole(sequence: Sequence, token_id: int) -> bool:
    """Go on in the choice's form; say whether nothing but the end of sequence may follow."""
    constraint = sequence.constraint
    if constraint is None:
        return False
    if not constraint.accept(token_id):
        raise ValueError(f"token {token_id} is not allowed by the form of the answer")
    return constraint.is_finished
