"""Compiles the kernels once for this machine: every `source/*.cpp` into one shared library in the cache folder.

Knows compilers, not what the kernels do. The invariant: a library appears under its name only when it is complete, and
its name holds the hash of sources, flags and compiler, so that a stale one is never taken.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math and no contraction: sums keep the order that the sources give them, in every variant of a kernel.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
LINK_FLAGS = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc")
X86_64_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
# What -march=x86-64-v3 means, in words that older compilers know too.
X86_64_V3_FLAGS = ("-mavx2", "-mbmi", "-mbmi2", "-mf16c", "-mfma", "-mmovbe")
COMPILE_TIMEOUT_S = 300


class BuildError(Exception):
    """There is no library for this machine, and none can be made."""


def default_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of compiled kernels: `kernels` in `$GEA_CACHE`, `$XDG_CACHE_HOME/gea` or `~/.cache/gea`."""
    environ = os.environ if environ is None else environ
    if named := environ.get("GEA_CACHE"):
        return Path(named).expanduser().absolute() / "kernels"
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gea" / "kernels"


def find_compiler(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the command of the C++ compiler: `$CXX`, else the first that is installed, else None."""
    environ = os.environ if environ is None else environ
    for command in (environ.get("CXX", ""), *COMPILERS):
        words = shlex.split(command)
        if words and (path := shutil.which(words[0], path=environ.get("PATH"))):
            return (path, *words[1:])
    return None


def machine_flags() -> tuple[str, ...]:
    """Return the instruction set to compile for: x86-64-v3 in the x86 family, else what every CPU has.

    Whatever this CPU has: an image is built on one machine and runs on others, under the same name of the library. So
    never -march=native. `load_library` keeps a CPU that lacks the instructions away from it.
    """
    return X86_64_V3_FLAGS if is_x86_64() else ()


def is_x86_64() -> bool:
    """Return whether this is a CPU of the x86 family."""
    return platform.machine().lower() in ("x86_64", "amd64")


def has_x86_64_v3() -> bool:
    """Return whether this CPU has AVX2, FMA and what belongs to them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and set(line.split()) >= X86_64_V3 for line in lines)


def build_library(
    folder: Path, compiler: Sequence[str] | None = None, flags: Sequence[str] | None = None, sources: Path = SOURCES
) -> Path:
    """Return the path of the compiled library in `folder`, compiling it where it is missing. Takes seconds.

    Without a compiler a library of the same sources and flags is taken as well, whoever compiled it: an image compiles
    while it is built. Raises BuildError where nothing can be had, with the compiler's words if it was the compiler.
    """
    flags = machine_flags() if flags is None else flags
    compiler = find_compiler() if compiler is None else compiler
    stem = f"gea-{_hash_sources(sources, flags)}"
    if not compiler:
        if found := sorted(folder.glob(f"{stem}-*.so")):
            return found[0]
        raise BuildError(f"no C++ compiler ($CXX, {', '.join(COMPILERS)}) and no compiled kernels in {folder}")
    target = folder / f"{stem}-{_hash_compiler(compiler)}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{target.name}.lock"):
            if not target.is_file():
                _compile(target, compiler, flags, sources)
    except OSError as error:
        raise BuildError(f"cannot compile the kernels: {error}") from error
    return target


def _compile(target: Path, compiler: Sequence[str], flags: Sequence[str], sources: Path) -> None:
    """Compile the sources at the same time, link, and rename the library to its name."""
    with tempfile.TemporaryDirectory(prefix=".gea-", suffix=".part", dir=target.parent) as scratch:
        files = sorted(sources.glob("*.cpp"))
        objects = [Path(scratch) / f"{file.stem}.o" for file in files]
        commands = [
            [*compiler, *FLAGS, *flags, "-c", str(file), "-o", str(made)]
            for file, made in zip(files, objects, strict=True)
        ]
        _run(commands)
        library = Path(scratch) / "library.so"
        _run([[*compiler, *map(str, objects), *LINK_FLAGS, "-o", str(library)]])
        library.chmod(0o755)
        library.rename(target)


def _run(commands: Sequence[Sequence[str]]) -> None:
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands
    ]
    try:
        said = [process.communicate(timeout=COMPILE_TIMEOUT_S)[0] for process in running]
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"the C++ compiler took longer than {COMPILE_TIMEOUT_S} s") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.communicate()
    for process, words in zip(running, said, strict=True):
        if process.returncode:
            raise BuildError(f"{shlex.join(process.args)} failed:\n{words[-2_000:]}")  # type: ignore[arg-type]


def _hash_sources(sources: Path, flags: Sequence[str]) -> str:
    digest = hashlib.sha256(repr((platform.machine(), FLAGS, LINK_FLAGS, tuple(flags))).encode())
    for file in sorted((*sources.glob("*.cpp"), *sources.glob("*.h"))):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _hash_compiler(compiler: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, timeout=COMPILE_TIMEOUT_S, check=False)
    return hashlib.sha256(repr(tuple(compiler)).encode() + version.stdout).hexdigest()[:8]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`. The lock is the kernel's: it falls with its process."""
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
