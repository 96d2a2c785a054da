from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.document import Document
from workers.retrieval.catalog import Catalog, passages_of

LONG = "A sentence of exactly seven words here. " * 60


def document(document_id: str = "a", text: str = "text", tenant: str = "default") -> Document:
    return Document(document_id=document_id, text=text, tenant=tenant, title="Title", language="en")


def drain(catalog: Catalog) -> dict[str, tuple[set[str], set[str]]]:
    """Return by tenant what is to be put and what is to be dropped."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    while (changes := catalog.take_changes(2)) is not None:
        puts, drops = found.setdefault(changes.tenant, (set(), set()))
        puts.update(passage.passage_id for passage in changes.passages)
        drops.update(changes.removed)
    return found


def test_long_document_becomes_numbered_passages() -> None:
    passages = passages_of(document(text=LONG))
    assert [passage.passage_id for passage in passages] == ["a", "a#2", "a#3"]
    assert {passage.document_id for passage in passages} == {"a"}


def test_shorter_version_removes_the_surplus_passages() -> None:
    catalog = Catalog()
    catalog.upsert(document(text=LONG))
    drain(catalog)
    catalog.upsert(document(text="short"))
    assert drain(catalog) == {"default": ({"a"}, {"a#2", "a#3"})}


def test_unchanged_document_makes_no_change() -> None:
    catalog = Catalog()
    catalog.upsert(document())
    drain(catalog)
    catalog.upsert(document())
    assert not catalog.has_changes


def test_document_that_moves_to_another_tenant_leaves_the_first() -> None:
    catalog = Catalog()
    catalog.upsert(document(tenant="one"))
    drain(catalog)
    catalog.upsert(document(tenant="two"))
    assert drain(catalog) == {"one": (set(), {"a"}), "two": ({"a"}, set())}
    assert catalog.passage("one", "a") is None and catalog.passage("two", "a") is not None


def test_changes_given_back_are_told_again() -> None:
    catalog = Catalog()
    catalog.upsert(document())
    changes = catalog.take_changes(10)
    assert changes is not None and not catalog.has_changes
    catalog.give_back(changes)
    assert catalog.take_changes(10) == changes


def test_deleting_the_unknown_is_fine() -> None:
    Catalog().delete("nobody")


STEPS = st.tuples(st.sampled_from("abc"), st.sampled_from(["one", "two", None]), st.sampled_from(["x", "y", LONG]))


@given(st.lists(st.tuples(STEPS, st.booleans()), max_size=25))
def test_index_that_follows_the_changes_equals_one_of_the_last_records(
    steps: list[tuple[tuple[str, str | None, str], bool]],
) -> None:
    catalog, index = Catalog(), dict[tuple[str, str], str]()
    last: dict[str, Document | None] = {}

    def follow() -> None:
        while (changes := catalog.take_changes(2)) is not None:
            index.update({(changes.tenant, p.passage_id): p.text for p in changes.passages})
            for passage_id in changes.removed:
                index.pop((changes.tenant, passage_id), None)

    for (document_id, tenant, text), is_followed in steps:
        last[document_id] = None if tenant is None else document(document_id, text, tenant)
        if (wanted := last[document_id]) is None:
            catalog.delete(document_id)
        else:
            catalog.upsert(wanted)
        if is_followed:
            follow()
    follow()
    assert index == {(d.tenant, p.passage_id): p.text for d in last.values() if d is not None for p in passages_of(d)}
