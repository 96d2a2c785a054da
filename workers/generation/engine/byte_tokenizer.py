"""A tokenizer without a vocabulary: bytes are tokens. For the engine that follows a script, and for tests.

The invariant: a text comes back whole from its tokens, however they are cut.
"""

from __future__ import annotations

from collections.abc import Sequence

END_OF_SEQUENCE = 256
VOCABULARY_SIZE = 512
CONTROL_NAMES = ("<|im_start|>", "<|im_end|>")


class ByteTokenizer:
    """One token for each byte of UTF-8; 256 ends an answer, control tokens come after it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that end an answer."""
        return frozenset({END_OF_SEQUENCE})

    def encode(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the bytes of the text."""
        return tuple(text.encode("utf-8", "replace"))

    def encode_control(self, text: str, *, is_start: bool = True) -> tuple[int, ...]:
        """Return the bytes of the text, with one id for each name of a control token."""
        for place, name in enumerate(CONTROL_NAMES):
            before, found, after = text.partition(name)
            if found:
                control_id = END_OF_SEQUENCE + 1 + place
                return (*self.encode_control(before), control_id, *self.encode_control(after))
        return self.encode(text)

    def count(self, text: str) -> int:
        """Return the number of bytes."""
        return len(self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without control tokens."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte, nothing for control tokens."""
        return bytes([token_id]) if 0 <= token_id < END_OF_SEQUENCE else b""
