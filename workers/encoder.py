"""Texts to vectors: all-MiniLM-L6-v2, or any BERT sentence encoder with mean pooling, from a folder.

The definition is that of sentence-transformers: the mean of the hidden states of all tokens of a text, divided by its
length (Reimers and Gurevych 2019). A vector depends on its text alone, up to float rounding, whatever else is in the
batch. Knows nothing of intents or documents.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer
from torch import Tensor

from schemas.errors import ConfigError
from workers.bert import Bert

Vectors = NDArray[np.float32]

# Padded tokens of one forward pass: on CPUs larger batches only take memory, not less time per text.
MAX_BATCH_TOKENS = 4096
# A text is cut here before it is tokenised: 256 tokens of any language end long before, and a text of a megabyte
# costs no more than one of 16 KiB.
MAX_CHARS_PER_TOKEN = 64


class Encoder:
    """A loaded sentence encoder. Blocking, thread-safe for reading; use `encode_async` on an event loop.

    `threads` sets torch's threads for the whole process. The owner calls `close`.
    """

    def __init__(self, folder: Path | str, *, threads: int | None = None, device: str = "cpu") -> None:
        """Load weights and tokenizer. Blocks for about half a second; raises ConfigError if the files do not fit."""
        folder = Path(folder)
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        self._model = Bert.load(folder, device)
        self._max_tokens = _max_tokens(folder, self._model.shape.max_position_embeddings)
        self._tokenizer = _tokenizer(folder, self._max_tokens)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encoder")
        self.identity = _identity(folder)

    @property
    def dimension(self) -> int:
        """Return the length of a vector."""
        return self._model.shape.hidden_size

    @property
    def max_tokens(self) -> int:
        """Return how many tokens of a text count, the two special ones included; the rest is cut off."""
        return self._max_tokens

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit vector per text, in order: (N, dimension) float32. Empty texts are allowed."""
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        encodings = self._tokenizer.encode_batch([self._clean(text) for text in texts])
        for places in _batches([len(encoding.ids) for encoding in encodings]):
            vectors[places] = self._forward([encodings[place] for place in places]).cpu().numpy()
        return vectors

    async def encode_async(self, texts: Sequence[str]) -> Vectors:
        """Encode on the encoder's own thread. Safe to cancel: the thread finishes its call, the result is dropped."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self.encode, list(texts))

    def close(self) -> None:
        """Stop the thread; `encode` still works. Idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _clean(self, text: str) -> str:
        # Half a surrogate pair (JSON can carry one) is no UTF-8, which the tokenizer insists on.
        return text[: self._max_tokens * MAX_CHARS_PER_TOKEN].encode("utf-8", "replace").decode("utf-8")

    @torch.inference_mode()
    def _forward(self, encodings: Sequence[Encoding]) -> Tensor:
        lengths = torch.tensor([len(encoding.ids) for encoding in encodings])  # (B,)
        longest = int(lengths.max())
        padded = [encoding.ids + [0] * (longest - len(encoding.ids)) for encoding in encodings]
        token_ids = torch.tensor(padded, device=self._device)  # (B, T)
        mask = (torch.arange(longest) < lengths[:, None]).to(self._device)  # (B, T) bool
        is_padded = int(lengths.min()) < longest
        hidden = self._model(token_ids, mask if is_padded else None)  # (B, T, D)
        return F.normalize(mean_pool(hidden, mask), dim=-1)  # (B, D)


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the hidden states (B, T, D) over the tokens that count, (B, T) bool: (B, D)."""
    weights = mask.unsqueeze(-1).to(hidden.dtype)  # (B, T, 1)
    return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield places sorted by length, so that hardly any padding is computed."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batch and lengths[batch[0]] * (len(batch) + 1) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _max_tokens(folder: Path, max_position: int) -> int:
    path = folder / "sentence_bert_config.json"
    if not path.is_file():
        return max_position
    return min(int(json.loads(path.read_text(encoding="utf-8")).get("max_seq_length") or max_position), max_position)


def _tokenizer(folder: Path, max_tokens: int) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"encoder: {path} is missing")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(max_tokens)  # the file's own limit is that of the training, 128
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "[SEP]" in a text is text
    return tokenizer


def _identity(folder: Path) -> str:
    resolved = folder.resolve()
    name = resolved.parent.name if resolved.name == "model" else resolved.name
    with (folder / "model.safetensors").open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    return f"{name}@{digest[:12]}"
