from __future__ import annotations

from pathlib import Path

import pytest

from schemas.errors import InvalidRequestError
from workers.retrieval.markdown import parse_markdown, read_documents

PAGE = """---
language: en
tags: [returns, refunds]
---
# Returns

Before the first section.

## Returning shoes
<!-- id: returns-shoes -->

You have 30 days.

```
## no heading
```

## Fees & costs
A return costs $4.50.

## Empty
<!-- id: empty -->
"""


def test_each_section_becomes_a_document() -> None:
    intro, shoes, fees = parse_markdown(PAGE, source="en/returns.md", tenant="shop", updated_ms=5)
    assert (intro.document_id, intro.title, intro.text) == ("en-returns", "Returns", "Before the first section.")
    assert (shoes.document_id, shoes.title) == ("returns-shoes", "Returns: Returning shoes")
    assert shoes.text == "You have 30 days.\n\n```\n## no heading\n```"
    assert (shoes.language, shoes.tags, shoes.tenant, shoes.updated_ms) == ("en", ("returns", "refunds"), "shop", 5)
    assert shoes.source == "en/returns.md"
    assert (fees.document_id, fees.text) == ("en-returns-fees-costs", "A return costs $4.50.")


def test_plain_page_is_one_document_named_by_its_file() -> None:
    [page] = parse_markdown("Just text.\n\nMore.", source="notes.md")
    assert (page.document_id, page.title, page.text, page.language) == ("notes", "notes", "Just text.\n\nMore.", "")


def test_chinese_headings_get_stable_ids_of_their_own() -> None:
    text = "# 退货\n\n## 鞋类\n三十天。\n\n## 服装\n四十五天。\n"
    first, second = parse_markdown(text, source="帮助.md")
    assert first.document_id != second.document_id
    assert [first, second] == parse_markdown(text, source="帮助.md")


def test_windows_line_ends_and_byte_order_mark_are_accepted() -> None:
    text = "\ufeff" + PAGE.replace("\n", "\r\n")
    assert [d.document_id for d in parse_markdown(text, source="en/returns.md")] == [
        d.document_id for d in parse_markdown(PAGE, source="en/returns.md")
    ]
    assert parse_markdown(text, source="x.md")[1].language == "en"


def test_empty_page_has_no_documents() -> None:
    assert parse_markdown("", source="a.md") == [] == parse_markdown("# Only a title\n", source="a.md")


@pytest.mark.parametrize(
    "text",
    [
        "---\na: [\n---\ntext",
        "---\n- a\n---\ntext",
        "## A\n<!-- id: x -->\none\n## B\n<!-- id: x -->\ntwo",
        "## A\n<!-- id: a/b -->\none",
        "## Same\none\n## Same\ntwo",
    ],
)
def test_malformed_page_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"page\.md"):
        parse_markdown(text, source="page.md")


def test_folder_is_read_in_order_and_ids_must_differ(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two", encoding="utf-8")
    (tmp_path / "one.md").write_text("one", encoding="utf-8")
    (tmp_path / "not.txt").write_text("no", encoding="utf-8")
    assert [document.document_id for document in read_documents(tmp_path)] == ["b-two", "one"]
    (tmp_path / "three.md").write_text("## X\n<!-- id: one -->\nagain", encoding="utf-8")
    with pytest.raises(InvalidRequestError, match=r"three\.md"):
        read_documents(tmp_path)


def test_file_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequestError, match=r"bad\.md"):
        read_documents(tmp_path / "bad.md")
