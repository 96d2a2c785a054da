"""Folders that are made once and shared by every checkout and run: jars, converted weights.

A folder appears under its final name only when it is complete: it is filled under a temporary name and renamed, under a
lock, so an interrupted run leaves nothing that looks finished and two runs at once make it once. The lock is the
kernel's (flock): it falls with its process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT_VARIABLE = "GEA_CACHE"

Say = Callable[[str], None]
"""Takes one line of progress for a person."""


def silent(_: str) -> None:
    """Say nothing."""


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return `$GEA_CACHE`, else `$XDG_CACHE_HOME/gea`, else `~/.cache/gea`; it need not exist."""
    environ = os.environ if environ is None else environ
    if named := environ.get(ENVIRONMENT_VARIABLE):
        return Path(named).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gea"


def make_once(folder: Path, fill: Callable[[Path], None], say: Say = silent) -> Path:
    """Return `folder`, filled by `fill(temporary_folder)` unless it exists already.

    Blocks while another process makes the same folder, and says so. Whatever `fill` raises passes through, and nothing
    stays.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f".{folder.name}.lock", say):
        if folder.is_dir():
            return folder
        _remove_leftovers(folder)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
        try:
            fill(temporary)
            temporary.chmod(0o755)  # mkdtemp makes it private
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def locked(path: Path, say: Say = silent) -> Iterator[None]:
    """Hold the lock file at `path`; waits for whoever holds it, and says so."""
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another run that makes the same")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _remove_leftovers(folder: Path) -> None:
    # Only called under the lock: whoever made these is gone.
    for leftover in folder.parent.glob(f".{folder.name}.*.part"):
        shutil.rmtree(leftover, ignore_errors=True)
