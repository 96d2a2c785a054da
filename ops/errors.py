"""What a command tells a person when it cannot go on: one line, and an exit code."""

from __future__ import annotations


class CommandError(Exception):
    """A command cannot do what was asked; the message is shown as it stands and names the remedy.

    `details` are further lines, for instance the end of a log; `code` goes into the JSON output.
    """

    def __init__(
        self, message: str, *, code: str = "failed", exit_code: int = 1, details: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.exit_code = exit_code
        self.details = details
