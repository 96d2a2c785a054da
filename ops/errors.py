"""What a command tells a person when it cannot go on: one line, and an exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class CommandError(Exception):
    """A command cannot do what was asked; the message is shown as it stands and names the remedy.

    `details` are further lines, for instance the end of a log. With `--json` one object is printed: `report`, what was
    found out until then, with the `error` beside it.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "failed",
        exit_code: int = 1,
        details: tuple[str, ...] = (),
        report: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.exit_code = exit_code
        self.details = details
        self.report = dict(report or {})
