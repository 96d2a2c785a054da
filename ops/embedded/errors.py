"""What can go wrong around the embedded servers and models.

    EmbeddedError
    ├── MissingPrerequisiteError   something must be installed first; the message names it and the remedy
    ├── PreparationError           jars or weights could not be fetched or converted; nothing half done is left
    └── ServerError                a server ended or did not become ready; the message ends with the place of its log

Every message is one line that can be shown to a person as it stands.
"""

from __future__ import annotations

from pathlib import Path


class EmbeddedError(Exception):
    """An embedded part cannot be used."""


class MissingPrerequisiteError(EmbeddedError):
    """Something that must be installed by hand is not there."""


class PreparationError(EmbeddedError):
    """A fetch or a conversion failed; it can be tried again."""


class ServerError(EmbeddedError):
    """A server ended early or was not ready in time."""

    def __init__(self, name: str, why: str, log: Path) -> None:
        super().__init__(f"{name} {why}; its log: {log}")
        self.log = log
