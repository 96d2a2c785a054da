"""The form of an answer as `gea ask` takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.commands.ask import response_format
from ops.errors import CommandError
from schemas.response_format import ChoiceFormat, JsonSchema, JsonSchemaFormat, RegexFormat


def test_each_option_is_a_form(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    assert response_format(None, None, None) is None
    assert response_format(None, None, []) is None
    assert response_format(file, None, []) == JsonSchemaFormat(json_schema=JsonSchema(schema={"type": "object"}))
    assert response_format(None, "a+", None) == RegexFormat(pattern="a+")
    assert response_format(None, None, ["a", "b"]) == ChoiceFormat(choices=("a", "b"))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_file_without_a_schema_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(CommandError, match=r"--json-schema .*schema\.json"):
        response_format(file, None, None)


def test_two_forms_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="one of"):
        response_format(None, "a", ["b"])
