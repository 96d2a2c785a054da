"""The compiled kernels as Python sees them: one shared library, loaded once, whose calls release the GIL.

Knows how to load and declare, not what a function does: each module that calls one declares it here by `function`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from workers.generation.engine.kernels.build import (
    BuildError,
    build_library,
    default_folder,
    find_compiler,
    has_x86_64_v3,
    is_x86_64,
)

_log = structlog.get_logger(__name__)


class Library:
    """A loaded library. ctypes lets go of the GIL for the time of each call."""

    def __init__(self, path: Path) -> None:
        """Load the library. Raises OSError if it is no library for this machine."""
        self.path = path
        self._loaded = ctypes.CDLL(str(path))

    def function(self, name: str, result: Any, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return a function with its ctypes types; `result` is None for void. Calls with others raise TypeError."""
        found = self._loaded[name]
        found.restype = result
        found.argtypes = list(arguments)
        return found


def load_library(folder: Path | None = None) -> Library | None:
    """Return the kernels, compiled into `folder` (None: the cache) where they are missing; None if they cannot be had.

    Why not is logged once for each folder. A CPU of the x86 family without AVX2 has none: torch is faster there.
    """
    return _load(default_folder() if folder is None else folder)


@functools.cache
def _load(folder: Path) -> Library | None:
    if is_x86_64() and not has_x86_64_v3():
        _log.warning("kernels.unavailable", reason="the CPU has no AVX2")
        return None
    try:
        return _open(folder)
    except (BuildError, OSError) as error:
        _log.warning("kernels.unavailable", reason=str(error))
        return None


def _open(folder: Path) -> Library:
    """Load what is compiled in a folder; what cannot be loaded is compiled again where there is a compiler."""
    path = build_library(folder)
    try:
        return Library(path)
    except OSError:
        if not find_compiler():
            raise
        path.unlink(missing_ok=True)
        return Library(build_library(folder))
