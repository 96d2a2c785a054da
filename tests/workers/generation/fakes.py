"""Tiny stand-ins: models over a paged cache of tokens, a folder with a tiny tokenizer, a prompter over bytes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from workers.generation.engine.batch import BlockCache, CacheLayout, Segment, StepBatch
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE, VOCABULARY_SIZE, ByteTokenizer
from workers.generation.engine.core import EngineCore
from workers.generation.engine.kv_cache import BlockPool
from workers.generation.engine.limits import Limits
from workers.generation.engine.loader import Loaded
from workers.generation.engine.protocol import EngineIdentity
from workers.generation.prompt import ChatTemplate, Prompter

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["The shop opens at nine and closes at seven.", "Return the shoes within 30 days.", "你好，世界", "🌶️ é👨‍👩‍👧"]
Cell = tuple[int, int] | None  # position and token


class PagedModel:
    """A `ModelRunner` whose cache holds the tokens themselves, and whose logits are `answer` of all that it reads back.

    So a table that is wrong, a position that is missing, stale or moved, and a copy that was left out change the
    answer or raise. With `pool`, a block is written only while it has one holder.

    `fails` names token ids: a step whose rows contain one raises. `broken` likewise: logits are NaN from there on. A
    step of more than `max_rows` rows is out of memory.
    """

    vocab_size = VOCABULARY_SIZE

    def __init__(
        self, answer: Callable[[Sequence[int]], torch.Tensor], *, num_blocks: int = 256, block_size: int = 16
    ) -> None:
        self._answer = answer
        self.layout = CacheLayout(num_blocks=num_blocks, block_size=block_size, bytes_per_block=1, identity="paged")
        self._blocks: list[list[Cell]] = [[None] * block_size for _ in range(num_blocks)]
        self.pool: BlockPool | None = None
        self.fails: frozenset[int] = frozenset()
        self.broken: frozenset[int] = frozenset()
        self.max_rows: int | None = None
        self.cleared: list[int] = []
        self.num_steps = 0
        self.batches: list[list[tuple[int, int, int]]] = []  # of each step: start, tokens and logits of its segments

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self.num_steps += 1
        self.batches.append([(each.start, len(each.token_ids), each.num_logits) for each in batch.segments])
        if self.max_rows is not None and batch.num_tokens > self.max_rows:
            raise torch.OutOfMemoryError("out of memory")
        for segment in batch.segments:
            self._write(segment)
        if any(self.fails & set(segment.token_ids) for segment in batch.segments):
            raise RuntimeError("the model has failed")
        rows = [row for segment in batch.segments for row in self._rows(segment)]
        return torch.stack(rows) if rows else torch.empty(0, VOCABULARY_SIZE)

    @property
    def cache(self) -> BlockCache:
        return self

    def copy_block(self, source: int, target: int) -> None:
        self._blocks[target] = list(self._blocks[source])

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        self.cleared += blocks
        for block in blocks:
            self._blocks[block] = [None] * self.layout.block_size

    def read_blocks(self, blocks: Sequence[int]) -> object:
        return [tuple(self._blocks[block]) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], content: object) -> None:
        assert isinstance(content, list)
        for block, cells in zip(blocks, content, strict=True):
            self._blocks[block] = list(cells)

    def allocator_slack_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._blocks.clear()

    def _write(self, segment: Segment) -> None:
        size = self.layout.block_size
        assert segment.token_ids and segment.num_logits <= len(segment.token_ids)
        assert len(segment.block_table) * size >= segment.end, "no block for a position"
        for position, token_id in enumerate(segment.token_ids, segment.start):
            block = segment.block_table[position // size]
            assert self.pool is None or self.pool.num_refs(block) == 1, "a shared block is written"
            self._blocks[block][position % size] = (position, token_id)

    def _rows(self, segment: Segment) -> list[torch.Tensor]:
        size = self.layout.block_size
        cells = [self._blocks[segment.block_table[place // size]][place % size] for place in range(segment.end)]
        assert [cell[0] for cell in cells if cell is not None] == list(range(segment.end)), (
            "not the positions asked for"
        )
        history = [cell[1] for cell in cells if cell is not None]
        return [self._row(history[:end]) for end in range(segment.end - segment.num_logits + 1, segment.end + 1)]

    def _row(self, history: Sequence[int]) -> torch.Tensor:
        logits = self._answer(history)
        return logits * float("nan") if self.broken & set(history) else logits


class ScriptedModel(PagedModel):
    """Answers each prompt with the bytes of `text`, then the end of sequence: logits peak at the next byte.

    With `num_prompt` the answer begins there, without it goes on behind what of it stands at the end already.
    """

    def __init__(
        self,
        text: str = "Hello.",
        *,
        peak: float = 20.0,
        num_prompt: int | None = None,
        num_blocks: int = 256,
        block_size: int = 16,
    ) -> None:
        super().__init__(self._script, num_blocks=num_blocks, block_size=block_size)
        self._text = (*text.encode(), END_OF_SEQUENCE)
        self._peak = peak
        self._num_prompt = num_prompt

    def _script(self, history: Sequence[int]) -> torch.Tensor:
        row = torch.zeros(VOCABULARY_SIZE)
        row[self._text[min(self._place(history), len(self._text) - 1)]] = self._peak
        return row

    def _place(self, history: Sequence[int]) -> int:
        if self._num_prompt is not None:
            return max(0, len(history) - self._num_prompt)
        longest = min(len(history), len(self._text))
        matches = (size for size in range(longest, 0, -1) if tuple(history[-size:]) == self._text[:size])
        return next(matches, 0)


class ContextModel(PagedModel):
    """Draws its logits from a hash of all tokens that it reads back.

    The answer is made of the bytes of `alphabet`; it ends at some time.
    """

    def __init__(self, alphabet: str = "abcdefgh .", *, num_blocks: int = 256, block_size: int = 16) -> None:
        super().__init__(context_logits(alphabet), num_blocks=num_blocks, block_size=block_size)


def context_logits(alphabet: str) -> Callable[[Sequence[int]], torch.Tensor]:
    """Return the function from all tokens to the next one's logits `(vocab,)` that `ContextModel` computes."""
    ids = torch.tensor([*sorted(set(alphabet.encode())), END_OF_SEQUENCE])

    def logits_of(history: Sequence[int]) -> torch.Tensor:
        digest = hashlib.sha256(repr(list(history)).encode()).digest()
        logits = torch.full((VOCABULARY_SIZE,), -30.0)
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        logits[ids] = torch.randn(len(ids), generator=generator)
        logits[END_OF_SEQUENCE] -= 2
        return logits

    return logits_of


def scripted_core(
    model: PagedModel,
    *,
    num_slots: int = 4,
    max_context: int = 512,
    prefill_chunk: int = 64,
    clock: Callable[[], float] = time.monotonic,
    **limits: object,
) -> EngineCore:
    """Return a core over a model. Without `max_draft` it does not guess: a step draws one token for each sequence."""
    chosen = {"max_draft": 0, "max_sequences": num_slots, "max_chunk": prefill_chunk, **limits}
    bounds = Limits(**chosen)  # type: ignore[arg-type]
    core = EngineCore(model, ByteTokenizer(), max_context=max_context, limits=bounds, clock=clock)
    model.pool = core.scheduler.pool
    return core


def assert_at_rest(core: EngineCore) -> None:
    """Nothing runs and nothing is held: every block is free, or in the prefix cache, or waits to be cleared."""
    core.step()  # clears
    pool = core.scheduler.pool
    assert core.is_idle
    assert (pool.num_free, pool.num_active) == (pool.num_blocks, 0)
    assert not any(pool.num_refs(block) for block in range(pool.num_blocks))


def scripted(model: PagedModel, *, num_slots: int = 4, max_context: int = 512) -> Loaded:
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
