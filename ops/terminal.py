"""How commands speak: progress and errors on stderr, results on stdout, one JSON object as its last line if asked.

Every command function is wrapped by `command`: a foreseeable failure becomes one clear line and a non-zero exit code,
never a stack trace. `start` does the same for wrong use.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import shutil
import signal
import sys
import unicodedata
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from typer.exceptions import TyperException

from ops.embedded.errors import EmbeddedError
from ops.errors import CommandError
from schemas.errors import GeaError

P = ParamSpec("P")
T = TypeVar("T")

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Reporter:
    """Tells a person on stderr how far a command has come."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)

    def step(self, name: str, text: str = "", seconds: float | None = None) -> None:
        """One thing is done."""
        took = f"[dim]{seconds:6.1f} s[/]" if seconds is not None else ""
        self._console.print(f"[green]✓[/] {_shown(name):<28} {_shown(text):<34} {took}".rstrip())

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show on a terminal that something is being waited for."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(escape(text)):
            yield

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self._console.print(f"  [dim]{_shown(text)}[/]")

    def say(self, text: str) -> None:
        """A plain line."""
        self._console.print(_shown(text))

    def warn(self, text: str) -> None:
        """Something is not as it should be, but the command goes on."""
        self._console.print(f"[yellow]! {_shown(text)}[/]")

    def fail(self, text: str, details: tuple[str, ...] = ()) -> None:
        """The command cannot go on."""
        for line in details:
            self._console.print(f"  [dim]{_shown(line)}[/]")
        self._console.print(f"[red]✗ {_shown(text)}[/]")


def emit_json(value: object, *, is_ascii: bool = False) -> None:
    """Print one JSON object as the last line of stdout; in ASCII where it quotes what strangers wrote."""
    print(json.dumps(value, ensure_ascii=is_ascii), flush=True)


def printable(text: str) -> str:
    """Return text that does nothing to a terminal: what is not printable is shown as its escape."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


def without_controls(text: str) -> str:
    """Return text of many lines that does nothing to a terminal; characters that join or shape others stay."""
    return "".join(char if char in "\n\t" or unicodedata.category(char) != "Cc" else printable(char) for char in text)


def safe_markup(text: str) -> str:
    """Return text of any origin as one line of markup that shows it and does nothing else."""
    return escape(printable(text))


def _shown(text: str) -> str:
    return "\n".join(map(safe_markup, text.split("\n")))


def start(app: typer.Typer) -> NoReturn:
    """Run a command line in the place of this program. Wrong use becomes one line too, and a JSON object if asked."""
    logging.getLogger("aiokafka").addHandler(logging.NullHandler())  # every try to connect; our error says it once
    try:
        code = app(standalone_mode=False)
    except TyperException as error:
        _refuse(error)
    except typer.Abort:
        code = INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _refuse(error: TyperException) -> NoReturn:
    if message := error.format_message():  # empty where no command was named: help was shown
        context = getattr(error, "ctx", None)
        path = context.command_path if context else Path(sys.argv[0]).name
        text = f"{message.rstrip('.')}: see `{path} --help`"
        Reporter().fail(text)
        if "--json" in sys.argv:
            emit_json({"error": {"code": "wrong_use", "message": text}})
    sys.exit(error.exit_code)


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Wrap a command: our errors become one line (and a JSON object with `--json`) and an exit code."""

    @functools.wraps(function)
    def run_command(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except (CommandError, GeaError, EmbeddedError) as error:
            fail(error, as_json=bool(kwargs.get("as_json")))
        except BrokenPipeError:
            raise  # Typer's own: who read us has gone
        except OSError as error:
            fail(CommandError(_of_system(error), code="os"), as_json=bool(kwargs.get("as_json")))
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise typer.Exit(INTERRUPTED) from None

    return run_command


def _of_system(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


def fail(error: CommandError | GeaError | EmbeddedError, *, as_json: bool) -> NoReturn:
    """Show why a command failed and leave with its exit code."""
    details = error.details if isinstance(error, CommandError) else ()
    Reporter().fail(str(error), details)
    if as_json:
        report = error.report if isinstance(error, CommandError) else {}
        told = report | {"error": {"code": getattr(error, "code", "failed"), "message": str(error)}}
        emit_json(told, is_ascii=True)  # a report may quote what strangers wrote
    raise typer.Exit(error.exit_code if isinstance(error, CommandError) else 1)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main`; the first SIGINT, SIGTERM or SIGHUP cancels it once, so that its clean-up runs undisturbed.

    Raises KeyboardInterrupt if it was cancelled that way.
    """

    async def supervised() -> T:
        task = asyncio.ensure_future(main)
        loop = asyncio.get_running_loop()
        is_stopping = False

        def stop() -> None:
            nonlocal is_stopping
            if not is_stopping:
                is_stopping = True
                task.cancel()

        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                loop.add_signal_handler(number, stop)
        try:
            return await task
        except asyncio.CancelledError:
            if is_stopping:
                raise KeyboardInterrupt from None
            raise

    return asyncio.run(supervised())


@contextlib.contextmanager
def first_interrupt() -> Iterator[asyncio.Event]:
    """Give an event that the first SIGINT sets, where it would end us; the next one cancels the task in here."""
    task, interrupted = asyncio.current_task(), asyncio.Event()

    def interrupt() -> None:
        if interrupted.is_set() and task is not None:
            task.cancel()
        interrupted.set()

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    yield interrupted


async def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run clean-up to its end even if we are cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = not task.cancelled()
    result = task.result()
    if is_cancelled:
        raise asyncio.CancelledError
    return result


def program() -> str:
    """Return how a person calls us here: `gea` if it is on the path, else by way of the checkout."""
    return "gea" if shutil.which("gea") else "ops/run"
