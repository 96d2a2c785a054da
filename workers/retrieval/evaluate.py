"""How good retrieval is: the usual measures as pure functions, and two data sets to take them on.

`python -m workers.retrieval.evaluate --encoder FOLDER --knowledge FOLDER --questions FILE` measures a knowledge base
with questions; `--beir FOLDER` measures a collection with graded judgements, per channel and fused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from schemas.document import Document
from workers.encoder import Encoder
from workers.retrieval.knowledge import KnowledgeBase, Query
from workers.retrieval.markdown import read_documents
from workers.retrieval.ranking import RankingSettings

# Nothing is cut by relevance, so that the measures see whole rankings.
UNCUT = {"min_cosine": -2.0, "other_min_cosine": -2.0, "min_coverage": -1.0, "cjk_min_coverage": -1.0}
CHANNELS = {
    "fused": RankingSettings(candidates=100, **UNCUT),
    "semantic": RankingSettings(candidates=100, keyword_weight=0.0, **UNCUT),
    "keyword": RankingSettings(candidates=100, semantic_weight=0.0, **UNCUT),
}


def hit(ranking: Sequence[str], relevant: Mapping[str, float], k: int) -> float:
    """Return 1 if one of the first k is relevant, else 0."""
    return float(any(relevant.get(id_, 0) > 0 for id_ in ranking[:k]))


def reciprocal_rank(ranking: Sequence[str], relevant: Mapping[str, float], k: int = 10) -> float:
    """Return 1 / place of the first relevant one among the first k, 0 if there is none."""
    places = (place for place, id_ in enumerate(ranking[:k], start=1) if relevant.get(id_, 0) > 0)
    return 1 / next(places, math.inf)


def recall(ranking: Sequence[str], relevant: Mapping[str, float], k: int) -> float:
    """Return which part of the relevant ones stands among the first k; 0 if nothing is relevant."""
    wanted = {id_ for id_, grade in relevant.items() if grade > 0}
    return len(wanted & set(ranking[:k])) / len(wanted) if wanted else 0.0


def ndcg(ranking: Sequence[str], relevant: Mapping[str, float], k: int = 10) -> float:
    """Return the discounted cumulative gain of the first k over that of the best order (Järvelin, Kekäläinen 2002).

    The gain is the grade itself, as trec_eval and BEIR take it.
    """
    best = _gain(sorted(relevant.values(), reverse=True)[:k])
    return _gain([relevant.get(id_, 0.0) for id_ in ranking[:k]]) / best if best else 0.0


def _gain(grades: Sequence[float]) -> float:
    return sum(max(grade, 0.0) / math.log2(place + 1) for place, grade in enumerate(grades, start=1))


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question, and the passage that has its answer."""

    id: str
    question: str
    passage_id: str
    language: str = ""
    split: str = ""
    fact: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The means over one group of questions; `missed` are the ids without a hit among the first `k`."""

    group: str
    num_questions: int
    k: int
    hit: float
    mrr: float
    recall: float
    ndcg: float
    missed: tuple[str, ...] = ()


def read_questions(path: Path) -> list[Question]:
    """Read questions, one JSON object per line; blocks."""
    return [msgspec.json.decode(line, type=Question) for line in path.read_bytes().splitlines() if line.strip()]


async def evaluate_questions(
    knowledge: KnowledgeBase, questions: Sequence[Question], *, k: int = 4, tenant: str = "default"
) -> list[Score]:
    """Ask all questions and return a score for each language and split, with all that serving does to a ranking."""
    found = await knowledge.search([Query(text=q.question, tenant=tenant, num_passages=max(k, 10)) for q in questions])
    rankings = [[passage.passage_id.partition("#")[0] for passage in passages] for passages in found]
    groups: dict[str, list[int]] = {}
    for place, question in enumerate(questions):
        groups.setdefault(f"{question.language}/{question.split}", []).append(place)
    return [
        _score(group, k, {questions[p].id: (rankings[p], {questions[p].passage_id: 1.0}) for p in places})
        for group, places in sorted(groups.items())
    ]


def _score(group: str, k: int, judged: Mapping[str, tuple[Sequence[str], Mapping[str, float]]]) -> Score:
    def mean(values: Iterator[float]) -> float:
        return round(sum(values) / len(judged), 4)

    return Score(
        group=group,
        num_questions=len(judged),
        k=k,
        hit=mean(hit(ranking, relevant, k) for ranking, relevant in judged.values()),
        mrr=mean(reciprocal_rank(ranking, relevant) for ranking, relevant in judged.values()),
        recall=mean(recall(ranking, relevant, k) for ranking, relevant in judged.values()),
        ndcg=mean(ndcg(ranking, relevant) for ranking, relevant in judged.values()),
        missed=tuple(id_ for id_, (ranking, relevant) in judged.items() if not hit(ranking, relevant, k)),
    )


async def evaluate_beir(encoder: Encoder, folder: Path, *, k: int = 10) -> list[Score]:
    """Measure each channel and their fusion on a collection in BEIR's form (corpus, queries, qrels)."""
    corpus = [json.loads(line) for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    queries = [json.loads(line) for line in (folder / "queries.jsonl").read_text(encoding="utf-8").splitlines()]
    grades: dict[str, dict[str, float]] = {}
    for line in (folder / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query_id, document_id, grade = line.split("\t")
        grades.setdefault(query_id, {})[document_id] = float(grade)
    documents = [
        Document(document_id=row["_id"], title=row.get("title", ""), text=row["text"])
        for row in corpus
        if row["text"].strip()
    ]
    judged = [query for query in queries if query["_id"] in grades]
    knowledge = KnowledgeBase(encoder)
    try:
        await knowledge.put(documents)
        return [
            _score(channel, k, await _rankings(knowledge.ranked_by(settings), judged, grades))
            for channel, settings in CHANNELS.items()
        ]
    finally:
        knowledge.close()


async def _rankings(
    knowledge: KnowledgeBase, queries: Sequence[Mapping[str, str]], grades: Mapping[str, Mapping[str, float]]
) -> dict[str, tuple[list[str], Mapping[str, float]]]:
    found = await knowledge.search([Query(text=query["text"], num_passages=50) for query in queries])
    # Several passages of a document count as the document once, at the place of the best.
    rankings = [list(dict.fromkeys(passage.document_id for passage in passages)) for passages in found]
    return {q["_id"]: (ranking, grades[q["_id"]]) for q, ranking in zip(queries, rankings, strict=True)}


async def _measure(options: argparse.Namespace) -> list[Score]:
    encoder = Encoder(options.encoder, threads=options.threads)
    try:
        if options.beir:
            return await evaluate_beir(encoder, options.beir)
        knowledge = KnowledgeBase(encoder)
        try:
            await knowledge.put(read_documents(options.knowledge))
            return await evaluate_questions(knowledge, read_questions(options.questions), k=options.k)
        finally:
            knowledge.close()
    finally:
        encoder.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write one JSON object per group."""
    parser = argparse.ArgumentParser(prog="python -m workers.retrieval.evaluate", description="Measure retrieval.")
    parser.add_argument("--encoder", type=Path, required=True, help="folder of the sentence encoder")
    parser.add_argument("--knowledge", type=Path, help="folder of Markdown files")
    parser.add_argument("--questions", type=Path, help="questions, one JSON object per line")
    parser.add_argument("--beir", type=Path, help="a collection in BEIR's form instead of knowledge and questions")
    parser.add_argument("--k", type=int, default=4, help="how many passages count as found")
    parser.add_argument("--threads", type=int, help="threads of the encoder")
    options = parser.parse_args(arguments)
    if not options.beir and not (options.knowledge and options.questions):
        parser.error("give --knowledge and --questions, or --beir")
    for score in asyncio.run(_measure(options)):
        row: dict[str, Any] = asdict(score)
        sys.stdout.write(json.dumps(row, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
