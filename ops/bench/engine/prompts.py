"""The prompts of the engine bench as token ids: prose that goes on, and questions with passages as the demo asks them.

Knows the demo's content and prompt building, no engines. The invariant: no two prompts of a process begin alike beyond
what the prompt's template gives all of them, so that no prefix cache answers for the measured work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ops.bench.engine.options import PROFILES, SHORT_RETRIEVAL_TOKENS, Profile, Workload
from schemas.document import Document
from schemas.request import GenerationRequest
from schemas.retrieval import Passage
from workers.generation.engine.protocol import Tokenizer
from workers.generation.prompt import Prompter
from workers.generation.strategies.knowledge import KnowledgeStrategy
from workers.generation.strategies.plan import StrategyContext
from workers.retrieval.markdown import read_documents

DEMO = Path(__file__).parents[2] / "demo"
PROSE = Path(__file__).parents[1] / "prose.txt"
STRIDE = 61  # coprime to most lengths of text: windows begin at ever other places
MORE = "More from the help centre"
SPARE_TOKENS = 8  # passages that are joined may take other tokens than each alone


class _Question(msgspec.Struct, frozen=True):
    question: str
    passage_id: str
    language: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMaker:
    """Makes the prompts of one model: the same ones each time."""

    tokenizer: Tokenizer
    prompter: Prompter
    prose: tuple[int, ...]
    questions: tuple[tuple[str, Document], ...]
    documents: tuple[Document, ...]

    @classmethod
    def load(cls, tokenizer: Tokenizer, folder: Path) -> PromptMaker:
        """Read the bench's prose and the demo's knowledge for a model folder."""
        documents = tuple(read_documents(DEMO / "knowledge" / "en"))
        by_id = {document.document_id: document for document in documents}
        lines = (DEMO / "questions.jsonl").read_text("utf-8").splitlines()
        asked = [msgspec.json.decode(line, type=_Question) for line in lines]
        text = PROSE.read_text("utf-8") + "\n\n" + "\n\n".join(document.text for document in documents)
        return cls(
            tokenizer=tokenizer,
            prompter=Prompter.load(folder, tokenizer, max_context=1 << 20),
            prose=tokenizer.encode(text),
            questions=tuple((each.question, by_id[each.passage_id]) for each in asked if each.passage_id in by_id),
            documents=documents,
        )

    def make(self, workload: Workload, profile: Profile, first: int, count: int) -> list[list[int]]:
        """Return prompts `first` to `first + count` of a workload."""
        make = self._plain if workload is Workload.PLAIN else self._retrieval
        return [make(profile, number) for number in range(first, first + count)]

    def _plain(self, profile: Profile, number: int) -> list[int]:
        start = number * STRIDE % len(self.prose)
        wanted = profile.prompt_tokens
        around = self.prose * (1 + (start + wanted) // len(self.prose))
        return list(around[start : start + wanted])

    def _retrieval(self, profile: Profile, number: int) -> list[int]:
        question, document = self.questions[number % len(self.questions)]
        turn = number // len(self.questions)
        first = Passage(text=document.text, title=document.title, document_id=document.document_id)
        bare = self._ask(question, [first, Passage(text="More.", title=MORE)])
        room = prompt_limit(profile) - len(bare) - SPARE_TOKENS
        second = self._filling(document, number + turn, room, is_one=profile == PROFILES["short"])
        return self._ask(question, [first, second] if turn % 2 == 0 else [second, first])

    def _ask(self, question: str, passages: Sequence[Passage]) -> list[int]:
        context = StrategyContext(
            request=GenerationRequest(prompt=question), prompter=self.prompter, passages=tuple(passages)
        )
        prompt = KnowledgeStrategy(quotes=False).plan(context).prompt
        assert prompt is not None, "a question with passages asks the model"
        return list(prompt)

    def _filling(self, document: Document, start: int, room: int, *, is_one: bool) -> Passage:
        """Return further documents as the second passage: one, or as many as fit into `room` tokens."""
        left = room
        texts: list[str] = []
        for offset in range(len(self.documents)):
            other = self.documents[(start * 7 + offset) % len(self.documents)]
            cost = self.tokenizer.count(other.text) + 2
            if other is document or cost > left:
                continue
            texts.append(other.text)
            left -= cost
            if is_one:
                break
        return Passage(text="\n\n".join(texts) or "Nothing.", title=MORE)


def prompt_limit(profile: Profile) -> int:
    """Return how long a prompt with passages may be; the tokenizer of another model may need more for the question."""
    return SHORT_RETRIEVAL_TOKENS if profile == PROFILES["short"] else profile.prompt_tokens


def num_prompt_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return the tokens of all prompts together."""
    return sum(map(len, prompts))
