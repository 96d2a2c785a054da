from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from schemas.errors import ConfigError
from tests.workers.intent.conftest import WordEncoder
from workers.intent.classifier import IntentClassifier, decide
from workers.intent.dataset import Row, load_rows
from workers.intent.features import excerpt, text_features
from workers.intent.glossary import gloss
from workers.intent.head import OUT_OF_SCOPE, Calibration, Head, load_head, save_head
from workers.intent.train import train

LABELS = ("greeting", OUT_OF_SCOPE, "returns")


def test_training_is_deterministic(encoder: WordEncoder, rows: list[Row], head: Head) -> None:
    again, report = train(rows, encoder, l2_choices=(1e-4,))
    assert np.array_equal(head.weight, again.weight)
    assert head.metadata == again.metadata
    assert report["rows"] == len(rows)


def test_a_trained_head_knows_its_intents(encoder: WordEncoder, head: Head) -> None:
    results = IntentClassifier(encoder, head).classify(["return the boots please", "hello there"], ["de", None])
    assert [result.intent for result in results] == ["returns", "greeting"]
    assert [result.language for result in results] == ["de", "en"]


def test_a_script_the_head_has_not_seen_is_out_of_scope(encoder: WordEncoder, head: Head) -> None:
    (result,) = IntentClassifier(encoder, head).classify(["Как вернуть обувь?"])
    assert (result.intent, result.language) == (OUT_OF_SCOPE, "ru")


def test_too_few_intents_or_rows_are_refused(encoder: WordEncoder, rows: list[Row]) -> None:
    with pytest.raises(ConfigError, match="at least two intents"):
        train([row for row in rows if row.intent == "returns"], encoder)
    with pytest.raises(ConfigError, match="rare has 1 rows"):
        train([*rows, Row(text="x", intent="rare")], encoder)


def test_a_saved_head_is_read_back_and_fits_only_its_encoder(encoder: WordEncoder, head: Head, tmp_path: Path) -> None:
    saved = save_head(head, tmp_path)
    loaded = load_head(tmp_path, encoder)
    assert np.array_equal(loaded.weight, saved.weight) and loaded.metadata == saved.metadata
    other = WordEncoder()
    other.identity = "words@0002"
    with pytest.raises(ConfigError, match="trained on encoder"):
        load_head(tmp_path, other)


def test_a_head_of_another_layout_or_with_changed_weights_is_refused(
    encoder: WordEncoder, head: Head, tmp_path: Path
) -> None:
    save_head(replace(head, metadata=msgspec.structs.replace(head.metadata, layout="older/0")), tmp_path)
    with pytest.raises(ConfigError, match="layout"):
        load_head(tmp_path, encoder)
    save_head(head, tmp_path)
    (tmp_path / "head.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ConfigError, match="is not the file"):
        load_head(tmp_path, encoder)
    with pytest.raises(ConfigError):
        load_head(tmp_path / "absent", encoder)


@pytest.mark.parametrize(
    ("probabilities", "similarity", "intent"),
    [
        ([0.1, 0.2, 0.7], 0.9, "returns"),
        ([0.1, 0.6, 0.3], 0.9, OUT_OF_SCOPE),
        ([0.4, 0.15, 0.45], 0.9, OUT_OF_SCOPE),
        ([0.1, 0.2, 0.7], 0.1, OUT_OF_SCOPE),
    ],
)
def test_the_class_the_confidence_and_the_distance_each_mean_out_of_scope(
    probabilities: list[float], similarity: float, intent: str
) -> None:
    calibration = Calibration(min_confidence=0.5, min_similarity=0.3)
    got, confidence, alternatives = decide(LABELS, np.array(probabilities, np.float32), similarity, calibration)
    assert got == intent
    assert 0 <= confidence <= 1 and got not in alternatives


def test_features_survive_odd_text(encoder: WordEncoder) -> None:
    texts = ["", "   ", "🌶️", "\ud83d", "长" * 5000, "a" * 100_000]
    features = text_features(texts, encoder)
    assert features.shape[0] == len(texts) and np.isfinite(features).all()


def test_a_margin_of_white_space_hides_nothing() -> None:
    assert excerpt(f"{' ' * 5_000}How do I return shoes?{chr(10) * 5_000}") == "How do I return shoes?"
    long = excerpt("a " * 1_000 + "b " * 1_000)
    assert len(long) <= 801 and long.startswith("a a") and long.endswith("b b")


def test_a_gloss_puts_known_words_into_english_and_leaves_other_text_alone() -> None:
    assert gloss("怎么退货") == "how return the goods"
    assert gloss("return  shoes") == "return  shoes"


def test_rows_are_read_from_each_kind_of_file(tmp_path: Path) -> None:
    for name, text in {
        "a.jsonl": '{"text": "hi", "intent": "a"}\n',
        "a.json": '[{"text": "hi", "intent": "a"}]',
        "a.csv": "text,intent\nhi,a\n",
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert load_rows(tmp_path / name) == [Row(text="hi", intent="a")]
    (tmp_path / "bad.jsonl").write_text('{"text": ""}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="row 1"):
        load_rows(tmp_path / "bad.jsonl")
