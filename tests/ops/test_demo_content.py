"""The demo's content keeps its own promises: every question has its passage, every fact stands in it."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

DEMO = Path(__file__).resolve().parents[2] / "ops" / "demo"
LANGUAGES = ("en", "zh")
PASSAGE = re.compile(r"^## (?P<heading>.+)\n<!-- id: (?P<id>[a-z0-9-]+) -->\n\n(?P<text>(?:(?!^#).*\n?)+)", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One `##` section of a knowledge file."""

    id: str
    heading: str
    text: str
    language: str


@cache
def passages() -> tuple[Passage, ...]:
    """Every passage of every knowledge file, in file order."""
    return tuple(
        Passage(id=match["id"], heading=match["heading"], text=match["text"].strip(), language=path.parent.name)
        for path in knowledge_files()
        for match in PASSAGE.finditer(path.read_text(encoding="utf-8"))
    )


def knowledge_files() -> list[Path]:
    return sorted((DEMO / "knowledge").glob("*/*.md"))


@cache
def rows(name: str) -> tuple[dict[str, Any], ...]:
    """The lines of one `.jsonl` file."""
    return tuple(json.loads(line) for line in (DEMO / name).read_text(encoding="utf-8").splitlines())


def questions() -> tuple[dict[str, Any], ...]:
    return rows("questions.jsonl")


def plain(text: str) -> str:
    """Fold case and white space, as the measuring of answers does."""
    return " ".join(text.casefold().split())


def repeated(values: list[str]) -> list[str]:
    return [value for value, count in Counter(values).items() if count > 1]


@pytest.mark.parametrize("path", knowledge_files(), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_knowledge_file_has_front_matter_and_title(path: Path) -> None:
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    matter = yaml.safe_load(front)
    assert matter["language"] == path.parent.name
    assert matter["tags"]
    assert all(isinstance(tag, str) for tag in matter["tags"])
    assert body.startswith("# ")


@pytest.mark.parametrize("path", knowledge_files(), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_section_carries_an_id(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(re.findall(r"^## ", text, re.M)) == len(PASSAGE.findall(text)) > 0


@pytest.mark.parametrize(("language", "least"), [("en", 66), ("zh", 24)])
def test_knowledge_is_large_enough(language: str, least: int) -> None:
    assert sum(passage.language == language for passage in passages()) >= least


def test_passage_ids_are_unique() -> None:
    assert repeated([passage.id for passage in passages()]) == []


def test_chinese_ids_have_their_prefix_and_english_ones_do_not() -> None:
    assert [p.id for p in passages() if p.id.startswith("zh-") != (p.language == "zh")] == []


def test_english_passages_have_a_readable_length() -> None:
    lengths = {p.id: len(p.text.split()) for p in passages() if p.language == "en"}
    assert {id_: n for id_, n in lengths.items() if not 30 <= n <= 130} == {}


def test_chinese_passages_have_a_readable_length() -> None:
    lengths = {p.id: len(re.sub(r"\s", "", p.text)) for p in passages() if p.language == "zh"}
    assert {id_: n for id_, n in lengths.items() if not 50 <= n <= 200} == {}


def test_headings_are_unique() -> None:
    assert repeated([passage.heading for passage in passages()]) == []


@pytest.mark.parametrize(("language", "least"), [("en", 72), ("zh", 24)])
def test_there_are_enough_questions(language: str, least: int) -> None:
    assert sum(question["language"] == language for question in questions()) >= least


def test_question_ids_and_texts_are_unique() -> None:
    assert repeated([question["id"] for question in questions()]) == []
    assert repeated([plain(question["question"]) for question in questions()]) == []


def test_first_question_is_the_one_of_the_demo() -> None:
    first = questions()[0]
    assert first["question"] == "How many days do I have to return shoes?"
    assert first["fact"] == ["30 days", "30-day", "thirty days"]


@pytest.mark.parametrize("question", questions(), ids=lambda question: str(question["id"]))
def test_fact_stands_in_its_passage_and_not_in_its_question(question: dict[str, Any]) -> None:
    passage = next(p for p in passages() if p.id == question["passage_id"])
    facts = [plain(fact) for fact in question["fact"]]
    assert question["language"] == passage.language
    assert any(fact in plain(passage.text) for fact in facts)
    assert not any(fact in plain(question["question"]) for fact in facts)
    assert all(fact and len(fact.split()) <= 4 for fact in facts)


@pytest.mark.parametrize("language", LANGUAGES)
def test_half_of_the_questions_are_held_out(language: str) -> None:
    splits = Counter(question["split"] for question in questions() if question["language"] == language)
    assert set(splits) == {"tuning", "held_out"}
    assert abs(splits["tuning"] - splits["held_out"]) <= 1


@cache
def intents() -> dict[str, dict[str, Any]]:
    """What `intents.yaml` says of each intent."""
    loaded: dict[str, dict[str, Any]] = yaml.safe_load((DEMO / "intents.yaml").read_text(encoding="utf-8"))
    return loaded


@cache
def templates() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEMO / "templates.yaml").read_text(encoding="utf-8"))
    return loaded


def letters(text: str) -> str:
    """Reduce a text to its letters and digits, so that punctuation cannot hide a leak."""
    return re.sub(r"[\W_]+", "", text.casefold()) or text


@pytest.mark.parametrize("name", intents())
def test_intent_is_described(name: str) -> None:
    assert set(intents()[name]) == {"description", "needs_retrieval", "strategy_hint"}
    assert intents()[name]["strategy_hint"] in {"knowledge", "dialogue", "continuation", "template"}
    # What is out of scope may have been refused wrongly.
    is_looked_up = intents()[name]["strategy_hint"] == "knowledge" or name == "out_of_scope"
    assert intents()[name]["needs_retrieval"] is is_looked_up


def test_utterances_use_described_intents_only() -> None:
    assert {row["intent"] for row in rows("intents.jsonl")} == set(intents())
    assert {row["language"] for row in rows("intents.jsonl")} == set(LANGUAGES)


@pytest.mark.parametrize("name", intents())
@pytest.mark.parametrize(
    ("language", "split", "least"), [("en", "train", 40), ("zh", "train", 10), ("en", "test", 8), ("zh", "test", 3)]
)
def test_intent_has_enough_utterances(name: str, language: str, split: str, least: int) -> None:
    found = Counter((row["intent"], row["language"], row["split"]) for row in rows("intents.jsonl"))
    assert found[name, language, split] >= least


def test_out_of_scope_is_the_largest_intent() -> None:
    train = Counter(row["intent"] for row in rows("intents.jsonl") if row["split"] == "train")
    assert train.most_common(1)[0][0] == "out_of_scope"
    assert train["out_of_scope"] >= 100


def test_no_utterance_is_repeated() -> None:
    assert repeated([plain(row["text"]) for row in rows("intents.jsonl")]) == []


def test_no_training_utterance_stands_in_the_test_split() -> None:
    splits = {split: texts_of(split) for split in ("train", "test")}
    assert splits["train"] & splits["test"] == set()


def test_no_utterance_is_one_of_the_questions() -> None:
    asked = {letters(question["question"]) for question in questions()}
    assert (texts_of("train") | texts_of("test")) & asked == set()


def texts_of(split: str) -> set[str]:
    return {letters(row["text"]) for row in rows("intents.jsonl") if row["split"] == split}


def test_every_template_intent_has_an_answer_in_every_language() -> None:
    wanted = {name for name, intent in intents().items() if intent["strategy_hint"] == "template"}
    wanted.add("out_of_scope")  # for the languages that the model does not speak
    assert set(templates()["answers"]) == wanted
    assert all(set(answers) == set(LANGUAGES) for answers in templates()["answers"].values())


@pytest.mark.parametrize("language", LANGUAGES)
def test_templates_need_the_name_of_the_shop_only(language: str) -> None:
    shop = templates()["shop"][language]
    filled = [answers[language].format(shop=shop) for answers in templates()["answers"].values()]
    assert all(answer.strip() and "{" not in answer for answer in filled)
    assert any(shop in answer for answer in filled)
