"""One cancellation, then undisturbed clean-up; errors as one line."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Iterator

import pytest
import typer
from rich.console import Console

from ops.errors import CommandError
from ops.terminal import Reporter, command, finish, run
from schemas.errors import ConfigError


async def test_clean_up_is_finished_however_often_it_is_cancelled() -> None:
    started, go_on, done = asyncio.Event(), asyncio.Event(), []

    async def clean_up() -> None:
        started.set()
        await go_on.wait()
        done.append("done")

    task = asyncio.create_task(finish(clean_up()))
    await started.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["done"]


async def test_failure_of_clean_up_passes_through() -> None:
    async def fail() -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        await finish(fail())


@pytest.fixture
def heeded(number: signal.Signals) -> Iterator[None]:
    """The signal is not ignored, as SIGHUP is where the tests run under nohup."""
    before = signal.signal(number, signal.default_int_handler)
    yield
    signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_cancels_once_and_lets_clean_up_run(number: signal.Signals, heeded: None) -> None:
    done = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0)
            done.append("cleaned")

    with pytest.raises(KeyboardInterrupt):
        run(main())
    assert done == ["cleaned"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(CommandError("x", exit_code=3), 3), (ConfigError("x"), 1), (KeyboardInterrupt(), 130)],
)
def test_foreseeable_failure_becomes_an_exit_code(error: BaseException, code: int) -> None:
    @command
    def fails() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        fails()
    assert caught.value.exit_code == code


def test_what_strangers_wrote_does_nothing_to_the_terminal_of_a_report() -> None:
    out = io.StringIO()
    reporter = Reporter(Console(file=out, force_terminal=True, color_system=None, width=200))
    for tell in (reporter.step, reporter.note, reporter.say, reporter.warn, reporter.fail):
        tell("a\x1b]0;x\x07[/b]\nb")
    assert not {"\x1b", "\x07"} & set(out.getvalue())
    assert out.getvalue().count(r"a\x1b]0;x\x07[/b]") == 5
