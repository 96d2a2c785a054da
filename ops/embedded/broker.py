"""Which broker the embedded stack runs, and why."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ops.embedded.cache import cache_folder
from ops.embedded.errors import MissingPrerequisiteError
from ops.embedded.jars import find_java, find_maven, jars_folder
from ops.embedded.kafka import EmbeddedKafka
from ops.embedded.tansu import EmbeddedTansu

ENVIRONMENT_VARIABLE = "GEA_BROKER"


class BrokerKind(enum.StrEnum):
    """The brokers that can be embedded."""

    KAFKA = "kafka"
    """Apache Kafka: the real thing; needs Java, and Maven once."""
    TANSU = "tansu"
    """Tansu: one binary, memory only, without guarantees; for the demo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaChoice:
    """A broker and the one line that says why it was taken."""

    kind: BrokerKind
    reason: str

    @property
    def is_fallback(self) -> bool:
        """Whether the person should be told what to install."""
        return self.kind is BrokerKind.TANSU


def choose_broker(force: str | None = None, environ: Mapping[str, str] | None = None) -> KafkaChoice:
    """Return Apache Kafka wherever it can run, else Tansu with the reason; `force` or `GEA_BROKER` decides alone.

    Blocks for some ten milliseconds, to ask Java for its version. Raises `MissingPrerequisiteError` for an
    unknown name.
    """
    environ = os.environ if environ is None else environ
    if named := force or environ.get(ENVIRONMENT_VARIABLE):
        return _forced(named)
    try:
        java = find_java(environ)
        if not jars_folder(cache_folder(environ)).exists():
            find_maven(environ)
    except MissingPrerequisiteError as missing:
        return KafkaChoice(
            kind=BrokerKind.TANSU, reason=f"{missing}. Until then Tansu: memory-only, without guarantees"
        )
    return KafkaChoice(kind=BrokerKind.KAFKA, reason=f"Apache Kafka runs on Java {java.version}")


def make_broker(
    choice: KafkaChoice,
    folder: Path,
    *,
    port: int | None = None,
    log_folder: Path | None = None,
    detached: bool = False,
) -> EmbeddedKafka | EmbeddedTansu:
    """Return the chosen broker, not yet started; both have `bootstrap` and `broker_name`."""
    kind = EmbeddedKafka if choice.kind is BrokerKind.KAFKA else EmbeddedTansu
    return kind(folder, port=port, log_folder=log_folder, detached=detached)


def _forced(name: str) -> KafkaChoice:
    try:
        kind = BrokerKind(name.lower())
    except ValueError:
        names = " or ".join(BrokerKind)
        raise MissingPrerequisiteError(f"{ENVIRONMENT_VARIABLE} is {name!r}; it must be {names}") from None
    loss = "; memory-only, without guarantees" if kind is BrokerKind.TANSU else ""
    return KafkaChoice(kind=kind, reason=f"{kind} was asked for{loss}")
