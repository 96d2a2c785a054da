from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from workers.encoder import Vectors
from workers.retrieval.vector_index import VectorIndex


def unit(*rows: tuple[float, ...]) -> Vectors:
    vectors = np.array(rows, dtype=np.float32)
    unit_vectors: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit_vectors


def test_nearest_come_first_and_k_may_exceed_the_index() -> None:
    index = VectorIndex(2)
    index.upsert(["east", "north"], unit((1, 0), (0, 1)))
    [hits] = index.search(unit((3, 1)), 10)
    assert [id_ for id_, _ in hits] == ["east", "north"]
    assert abs(hits[0][1] - 3 / 10**0.5) < 1e-5


def test_empty_index_finds_nothing() -> None:
    assert VectorIndex(2).search(unit((1, 0), (0, 1)), 5) == [[], []]


def test_removed_and_replaced_vectors_are_gone() -> None:
    index = VectorIndex(2)
    index.upsert(["a", "b"], unit((1, 0), (0, 1)))
    index.upsert(["a"], unit((-1, 0)))
    index.remove(["b", "unknown"])
    assert len(index) == 1
    assert index.search(unit((1, 0)), 5) == [[("a", -1.0)]]


def test_equal_cosines_stand_in_the_order_of_the_ids() -> None:
    index = VectorIndex(2)
    index.upsert(["b", "c", "a"], unit((1, 0), (1, 0), (1, 0)))
    assert [id_ for id_, _ in index.search(unit((1, 0)), 3)[0]] == ["a", "b", "c"]


def test_vector_that_is_no_number_is_never_found() -> None:
    index = VectorIndex(2)
    index.upsert(["bad", "good"], np.array([[np.nan, 0], [1, 0]], dtype=np.float32))
    assert [id_ for id_, _ in index.search(unit((1, 0)), 5)[0]] == ["good"]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 30), st.booleans()), max_size=40))
def test_index_equals_a_dictionary_of_vectors(steps: list[tuple[str, int, bool]]) -> None:
    index, expected = VectorIndex(2), dict[str, Vectors]()
    for id_, angle, is_put in steps:
        if is_put:
            expected[id_] = unit((np.cos(angle), np.sin(angle)))[0]
            index.upsert([id_], expected[id_][None])
        else:
            expected.pop(id_, None)
            index.remove([id_])
    query = unit((1, 0.3))
    [hits] = index.search(query, 10)
    assert {id_: round(score, 4) for id_, score in hits} == {
        id_: round(float(vector @ query[0]), 4) for id_, vector in expected.items()
    }
