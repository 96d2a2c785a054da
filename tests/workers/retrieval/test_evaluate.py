from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.workers.tiny_encoder import real_encoder_folder
from workers.encoder import Encoder
from workers.retrieval.evaluate import evaluate_questions, hit, ndcg, read_questions, recall, reciprocal_rank
from workers.retrieval.knowledge import KnowledgeBase, Query
from workers.retrieval.markdown import read_documents

DEMO = Path(__file__).parents[3] / "ops" / "demo"


def test_hit_counts_the_first_k_only() -> None:
    assert [hit(["a", "b"], {"b": 1}, k) for k in (1, 2, 9)] == [0, 1, 1]


def test_reciprocal_rank_is_that_of_the_first_relevant() -> None:
    assert reciprocal_rank(["a", "b", "c"], {"b": 1, "c": 1}) == 0.5
    assert reciprocal_rank(["a"] * 10 + ["b"], {"b": 1}) == 0


def test_recall_is_the_part_that_was_found() -> None:
    assert recall(["a", "x"], {"a": 1, "b": 2, "c": 0}, 2) == 0.5
    assert recall(["a"], {}, 2) == 0


def test_ndcg_is_one_for_the_best_order_and_counts_grades() -> None:
    grades = {"a": 3.0, "b": 1.0}
    assert ndcg(["a", "b"], grades) == 1
    assert ndcg(["b", "a"], grades) == pytest.approx((1 + 3 / math.log2(3)) / (3 + 1 / math.log2(3)))
    assert ndcg([], grades) == 0 == ndcg(["a"], {})


@pytest.mark.model
async def test_demo_questions_hit_their_passage() -> None:
    encoder = Encoder(real_encoder_folder())
    knowledge = KnowledgeBase(encoder)
    await knowledge.put(read_documents(DEMO / "knowledge"))
    scores = await evaluate_questions(knowledge, read_questions(DEMO / "questions.jsonl"))
    unrelated = await knowledge.search([Query(text=text) for text in ("Will it rain in Boston?", "明天会下雨吗")])
    knowledge.close()
    encoder.close()
    assert {score.group for score in scores} == {"en/held_out", "en/tuning", "zh/held_out", "zh/tuning"}
    assert all(score.hit >= 0.9 for score in scores), scores
    assert unrelated == [(), ()]
