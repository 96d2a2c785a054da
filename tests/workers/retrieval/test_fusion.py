from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.retrieval.fusion import reciprocal_rank_fusion

IDS = st.sampled_from([f"p{number}" for number in range(12)])
RANKINGS = st.dictionaries(st.sampled_from(["semantic", "keyword", "other"]), st.lists(IDS, unique=True))


def test_scores_are_those_of_the_paper() -> None:
    fused = dict(reciprocal_rank_fusion({"semantic": ["a", "b"], "keyword": ["b", "c"]}))
    assert fused == pytest.approx({"a": 1 / 61, "b": 1 / 62 + 1 / 61, "c": 1 / 62})


def test_ties_stand_in_the_order_of_the_ids() -> None:
    assert [id_ for id_, _ in reciprocal_rank_fusion({"semantic": ["z"], "keyword": ["a"]})] == ["a", "z"]


def test_channel_of_weight_zero_is_left_out() -> None:
    assert [id_ for id_, _ in reciprocal_rank_fusion({"s": ["a"], "k": ["b"]}, {"s": 0.0})] == ["b"]


@given(RANKINGS)
def test_every_id_stands_once_in_falling_order(rankings: dict[str, list[str]]) -> None:
    fused = reciprocal_rank_fusion(rankings)
    assert sorted(id_ for id_, _ in fused) == sorted({id_ for ranking in rankings.values() for id_ in ranking})
    assert fused == sorted(fused, key=lambda item: (-item[1], item[0]))


@given(st.lists(IDS, unique=True), st.floats(0.01, 10))
def test_one_channel_keeps_its_order(ranking: list[str], weight: float) -> None:
    assert [id_ for id_, _ in reciprocal_rank_fusion({"only": ranking}, {"only": weight})] == ranking


@given(RANKINGS, IDS, IDS)
def test_id_that_is_before_another_everywhere_stays_before_it(
    rankings: dict[str, list[str]], one: str, other: str
) -> None:
    both = {name: ranking for name, ranking in rankings.items() if one in ranking}
    if one == other or not both or any(other in r and r.index(other) < r.index(one) for r in both.values()):
        return
    order = [id_ for id_, _ in reciprocal_rank_fusion(both)]
    assert other not in order or order.index(one) < order.index(other)


@given(RANKINGS)
def test_order_of_the_channels_does_not_matter(rankings: dict[str, list[str]]) -> None:
    assert reciprocal_rank_fusion(rankings) == reciprocal_rank_fusion(dict(reversed(rankings.items())))
