"""Prepared answers: a text for each intent and language, given as data. No engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from schemas.errors import ConfigError
from schemas.request import Strategy
from workers.generation.strategies.plan import Plan, StrategyContext, fixed, sampling_for

FALLBACK = "I have no prepared answer for this. Please ask in other words."
FALLBACK_LANGUAGE = "en"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateBook:
    """Texts by intent, then by language."""

    texts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> TemplateBook:
        """Read a YAML file with `answers` (intent, language, text) and `shop` (its name by language, for `{shop}`).

        Raises ConfigError that names the file and the key.
        """
        try:
            raw = yaml.safe_load(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"templates: cannot read {path}: {error}") from error
        shop, answers = _texts(path, raw, "shop"), raw.get("answers") if isinstance(raw, dict) else None
        if not isinstance(answers, dict):
            raise ConfigError(f"templates: {path}: answers: a map of intents is expected")
        texts = {str(intent): _texts(path, answers, intent) for intent in answers}
        named = {
            intent: {language: text.replace("{shop}", shop.get(language, "")) for language, text in by_language.items()}
            for intent, by_language in texts.items()
        }
        return cls(texts=named)

    def find(self, intent: str, language: str) -> str | None:
        """Return the text of an intent, None if there is none in that language."""
        return self.texts.get(intent, {}).get(language)


class TemplateStrategy:
    """A prepared text of the intent."""

    name = Strategy.TEMPLATE

    def __init__(self, book: TemplateBook) -> None:
        self._book = book

    def plan(self, context: StrategyContext) -> Plan:
        """Return the text in the request's language, else in English, else that there is none."""
        intent = context.intent.intent if context.intent else ""
        text = self._book.find(intent, context.language) or self._book.find(intent, FALLBACK_LANGUAGE) or FALLBACK
        return Plan(strategy=self.name, sampling=sampling_for(context), pieces=fixed(context, text.strip()))


def _texts(path: Path, raw: Any, key: Any) -> dict[str, str]:
    found = raw.get(key, {}) if isinstance(raw, dict) else {}
    if not isinstance(found, dict) or not all(isinstance(text, str) and text.strip() for text in found.values()):
        raise ConfigError(f"templates: {path}: {key}: a map of languages to texts is expected")
    return {str(language): text for language, text in found.items()}
