"""The process of one entrant: started, asked line by line, ended. Knows how each entrant is started, not what it runs.

The invariant: whoever enters the context leaves no process behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ops.bench.engine.options import EngineName
from ops.errors import CommandError

ROOT = Path(__file__).parents[3]
PACKAGE = "ops.bench.engine"
LINE_BYTES = 1 << 28  # the arrivals of 256 long answers
LOG_LINES = 12
END_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """How an entrant is started: interpreter, module and arguments."""

    python: Path
    module: str
    arguments: tuple[str, ...] = ()


def starter(engine: EngineName, peers_python: Path | None) -> Starter:
    """Return how an engine is started. llama.cpp needs the peers' interpreter."""
    own = Path(sys.executable)
    match engine:
        case EngineName.GEA:
            return Starter(python=own, module=f"{PACKAGE}.gea_entrant")
        case EngineName.GENERATE_BATCH:
            return Starter(python=own, module=f"{PACKAGE}.transformers_entrant", arguments=("batch",))
        case EngineName.GENERATE:
            return Starter(python=own, module=f"{PACKAGE}.transformers_entrant", arguments=("static",))
        case EngineName.LLAMA_CPP:
            assert peers_python is not None, "without it llama.cpp does not take part"
            return Starter(python=peers_python, module=f"{PACKAGE}.llama_entrant")


class EntrantProcess:
    """A running entrant. Commands are answered one after another."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self.name = name
        self._process = process
        self._log = log

    async def ask(self, **command: Any) -> dict[str, Any]:
        """Return the answer to a command. Raises CommandError with the end of the log if there is none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ConnectionError:
            line = b""
        if not line:
            raise CommandError(f"{self.name} has ended before its answer", details=self._tail())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise CommandError(f"{self.name}: {answer['error']}", details=self._tail())
        return answer

    def _tail(self) -> tuple[str, ...]:
        self._log.seek(0)
        return tuple(self._log.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:])


@asynccontextmanager
async def running(name: str, how: Starter, threads: int) -> AsyncIterator[EntrantProcess]:
    """An entrant that has nothing loaded yet; it is ended with the context."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *(str(how.python), "-W", "ignore", "-m", how.module, *how.arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env=environment(threads),
            limit=LINE_BYTES,
        )
        try:
            yield EntrantProcess(name, process, log)
        finally:
            await _end(process)


def environment(threads: int) -> dict[str, str]:
    """Return our environment without GEA's variables, with as many threads for everybody."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("GEA_")}
    number = str(threads)
    return own | {
        "OMP_NUM_THREADS": number,
        "MKL_NUM_THREADS": number,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        process.kill()
        await process.wait()
