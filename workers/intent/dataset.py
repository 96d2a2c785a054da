"""Texts with known intents, from the files that people have them in."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from schemas.errors import ConfigError
from workers.intent.language import detect_language

TRAIN_SPLIT = "train"
TEST_SPLIT = "test"

_TEXT_COLUMNS = ("text", "utterance")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One text and what it means. Rows without a split are for training."""

    text: str
    intent: str
    language: str = "en"
    split: str = TRAIN_SPLIT


def load_rows(path: Path) -> list[Row]:
    """Read `.jsonl`, `.json` (a list of objects) or `.csv`, each with text, intent and perhaps language and split.

    Raises ConfigError that names the file and the line. Blocking.
    """
    try:
        raw = path.read_text(encoding="utf-8")
        match path.suffix:
            case ".jsonl":
                found = [json.loads(line) for line in raw.splitlines() if line.strip()]
            case ".json":
                found = json.loads(raw)
            case ".csv":
                found = list(csv.DictReader(io.StringIO(raw)))
            case _:
                raise ConfigError(f"{path}: .jsonl, .json or .csv is expected")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(found, list) or not found:
        raise ConfigError(f"{path}: a list with at least one row is expected")
    return [_row(value, f"{path}: row {number}") for number, value in enumerate(found, start=1)]


def _row(value: object, place: str) -> Row:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: an object with text and intent is expected")
    text = next((value[column] for column in _TEXT_COLUMNS if column in value), None)
    intent = value.get("intent")
    if not (isinstance(text, str) and text.strip() and isinstance(intent, str) and intent.strip()):
        raise ConfigError(f"{place}: text and intent must be there and not empty")
    options: dict[str, Any] = {
        "language": value.get("language") or detect_language(text),
        "split": value.get("split") or TRAIN_SPLIT,
    }
    return Row(text=text, intent=intent.strip(), **options)
