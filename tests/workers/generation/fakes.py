"""Tiny stand-ins: a model of fixed logits, a folder with a tiny random Llama, a prompter over bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from workers.generation.engine.core import EngineCore
from workers.generation.engine.fake import END_OF_SEQUENCE, VOCABULARY_SIZE, ByteTokenizer
from workers.generation.engine.loader import Loaded
from workers.generation.engine.model import DecodeRows, PrefillChunk
from workers.generation.engine.protocol import EngineIdentity
from workers.generation.prompt import ChatTemplate, Prompter

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["The shop opens at nine and closes at seven.", "Return the shoes within 30 days.", "你好，世界", "🌶️ é👨‍👩‍👧"]


class ScriptedModel:
    """Answers each prompt with the bytes of `text`, then the end of sequence: logits peak at the next byte.

    `fails` names token ids: a step whose rows contain one raises. Without `num_prompt` the answer begins where the last
    prefill ends.
    """

    def __init__(self, text: str = "Hello.", *, peak: float = 20.0, num_prompt: int | None = None) -> None:
        self._script = (*text.encode(), END_OF_SEQUENCE)
        self._peak = peak
        self._num_prompt = num_prompt
        self._started: dict[int, int] = {}  # slot to the position of its first answer token
        self.fails: frozenset[int] = frozenset()
        self.broken: frozenset[int] = frozenset()  # slots whose logits are NaN
        self.cleared: list[int] = []
        self.num_steps = 0

    def forward(self, decode: DecodeRows | None, prefill: PrefillChunk | None) -> torch.Tensor:
        self.num_steps += 1
        tokens = (*(decode.token_ids if decode else ()), *(prefill.token_ids if prefill else ()))
        if self.fails & set(tokens):
            raise RuntimeError("out of memory")
        rows = []
        if decode is not None:
            for slot, position in zip(decode.slots, decode.positions, strict=True):
                rows.append(self._row(slot, position + 1 - self._started[slot]))
        if prefill is not None:
            end = prefill.start + len(prefill.token_ids)
            self._started[prefill.slot] = end if self._num_prompt is None else self._num_prompt
            rows.append(self._row(prefill.slot, max(0, end - self._started[prefill.slot])))
        return torch.stack(rows)

    def fork(self, source: int, target: int, length: int) -> None:
        self._started[target] = length if self._num_prompt is None else self._num_prompt

    def clear(self, slot: int) -> None:
        self.cleared.append(slot)

    def _row(self, slot: int, place: int) -> torch.Tensor:
        row = torch.zeros(VOCABULARY_SIZE)
        row[self._script[min(place, len(self._script) - 1)]] = self._peak
        return row * float("nan") if slot in self.broken else row


class ContextModel:
    """Draws its logits from a hash of all tokens in the slot: one that is wrong, missing or moved changes the answer.

    The answer is made of the bytes of `alphabet`; it ends at some time.
    """

    def __init__(self, alphabet: str = "abcdefgh .") -> None:
        self._ids = torch.tensor([*sorted(set(alphabet.encode())), END_OF_SEQUENCE])
        self._slots: dict[int, list[int]] = {}
        self.num_steps = 0

    def forward(self, decode: DecodeRows | None, prefill: PrefillChunk | None) -> torch.Tensor:
        self.num_steps += 1
        rows = []
        if decode is not None:
            for row in zip(decode.token_ids, decode.slots, decode.positions, strict=True):
                rows.append(self._read((row[0],), *row[1:]))
        if prefill is not None:
            rows.append(self._read(prefill.token_ids, prefill.slot, prefill.start))
        return torch.stack(rows)

    def fork(self, source: int, target: int, length: int) -> None:
        self._slots[target] = self._slots[source][:length]

    def clear(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def _read(self, token_ids: tuple[int, ...], slot: int, start: int) -> torch.Tensor:
        held = self._slots.setdefault(slot, [])
        assert token_ids and len(held) >= start, "a gap in the slot"
        held[start:] = token_ids
        digest = hashlib.sha256(repr(held).encode()).digest()
        logits = torch.full((VOCABULARY_SIZE,), -30.0)
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        logits[self._ids] = torch.randn(len(self._ids), generator=generator)
        logits[END_OF_SEQUENCE] -= 2
        return logits


def scripted_core(
    model: ScriptedModel | ContextModel, *, num_slots: int = 4, max_context: int = 512, prefill_chunk: int = 64
) -> EngineCore:
    return EngineCore(
        model,
        ByteTokenizer(),
        vocab_size=VOCABULARY_SIZE,
        max_context=max_context,
        num_slots=num_slots,
        prefill_chunk=prefill_chunk,
    )


def scripted(model: ScriptedModel, *, num_slots: int = 4, max_context: int = 512) -> Loaded:
    """Return what a `LocalEngine` loads, without a model folder."""
    identity = EngineIdentity(
        engine="local",
        model="scripted",
        weights_hash="w",
        tokenizer_hash="t",
        precision="fp32",
        max_context=max_context,
    )
    core = scripted_core(model, num_slots=num_slots, max_context=max_context)
    return Loaded(core=core, tokenizer=ByteTokenizer(), identity=identity, vocab_size=VOCABULARY_SIZE)


def byte_prompter(max_context: int = 4_096) -> Prompter:
    return Prompter(ByteTokenizer(), ChatTemplate(CHAT_TEMPLATE, {}), max_context=max_context)


def save_tokenizer(folder: Path) -> None:
    """Train a small byte-level BPE on a few lines and write it with its chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}))
