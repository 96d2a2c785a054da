"""Compiling the kernels: once, whole, and with a word where it cannot be done."""

from __future__ import annotations

import ctypes
import functools
import platform
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from workers.generation.engine.kernels import build, library
from workers.generation.engine.kernels.build import (
    BuildError,
    build_library,
    default_folder,
    find_compiler,
    has_x86_64_v3,
    machine_flags,
)
from workers.generation.engine.kernels.library import Library, load_library

EXPORT = 'extern "C" __attribute__((visibility("default")))'
GOOD = f'#include "seven.h"\n{EXPORT} int seven() {{ return SEVEN; }}\n'


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "seven.h").write_text("#define SEVEN 7\n", encoding="utf-8")
    (folder / "seven.cpp").write_text(GOOD, encoding="utf-8")
    return folder


def seven(path: Path) -> int:
    return int(Library(path).function("seven", ctypes.c_int, [])())


needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@needs_compiler
def test_a_library_is_compiled_once_and_leaves_nothing_else(tmp_path: Path, sources: Path) -> None:
    first = build_library(tmp_path / "made", sources=sources)
    before = first.stat().st_mtime_ns
    assert build_library(tmp_path / "made", sources=sources) == first
    assert first.stat().st_mtime_ns == before
    assert seven(first) == 7
    assert [path.name for path in (tmp_path / "made").iterdir() if not path.name.startswith(".")] == [first.name]


@needs_compiler
def test_a_changed_header_makes_another_library(tmp_path: Path, sources: Path) -> None:
    first = build_library(tmp_path / "made", sources=sources)
    (sources / "seven.h").write_text("#define SEVEN 8\n", encoding="utf-8")
    second = build_library(tmp_path / "made", sources=sources)
    assert second != first
    assert seven(second) == 8


@needs_compiler
def test_other_flags_make_another_library(tmp_path: Path, sources: Path) -> None:
    made = {build_library(tmp_path / "made", sources=sources, flags=flags) for flags in ((), ("-DOTHER=1",))}
    assert len(made) == 2


@needs_compiler
def test_the_words_of_the_compiler_are_passed_on(tmp_path: Path, sources: Path) -> None:
    (sources / "broken.cpp").write_text("int broken( {\n", encoding="utf-8")
    with pytest.raises(BuildError, match=r"broken\.cpp"):
        build_library(tmp_path / "made", sources=sources)
    assert list((tmp_path / "made").glob("*.so")) == []
    assert list((tmp_path / "made").glob(".*.part")) == []


@needs_compiler
def test_without_a_compiler_a_library_of_the_same_sources_is_taken(tmp_path: Path, sources: Path) -> None:
    made = build_library(tmp_path / "made", sources=sources)
    assert build_library(tmp_path / "made", compiler=(), sources=sources) == made
    (sources / "seven.h").write_text("#define SEVEN 8\n", encoding="utf-8")
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build_library(tmp_path / "made", compiler=(), sources=sources)


def test_the_compiler_is_the_named_one_else_the_first_there_is(tmp_path: Path) -> None:
    for name in ("g++", "my-compiler"):
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = str(tmp_path)
    assert find_compiler({"PATH": path, "CXX": "my-compiler -m64"}) == (f"{path}/my-compiler", "-m64")
    assert find_compiler({"PATH": path, "CXX": "missing"}) == (f"{path}/g++",)
    assert find_compiler({"PATH": str(tmp_path / "nowhere")}) is None


def test_the_cache_is_where_the_other_caches_are() -> None:
    assert default_folder({"GEA_CACHE": "/c"}) == Path("/c/kernels")
    assert default_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/gea/kernels")
    assert default_folder({}) == Path.home() / ".cache/gea/kernels"


def test_never_compiles_for_this_cpu_alone() -> None:
    assert not any("native" in flag or "fast-math" in flag for flag in machine_flags())


def test_the_name_of_the_library_does_not_depend_on_the_cpu_of_the_machine_that_builds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = machine_flags()
    monkeypatch.setattr(build, "has_x86_64_v3", lambda: False)
    assert machine_flags() == flags
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert machine_flags() == ()
    monkeypatch.setattr(platform, "machine", lambda: "AMD64")
    assert "-mavx2" in machine_flags()


def test_a_fallback_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with capture_logs() as logs:
        assert load_library(tmp_path / "empty") is None
        assert load_library(tmp_path / "empty") is None
    assert [entry["event"] for entry in logs] == ["kernels.unavailable"]


def test_a_folder_that_cannot_be_written_is_a_build_error(tmp_path: Path, sources: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BuildError):
        build_library(tmp_path / "file" / "made", sources=sources)


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_compiled_again(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.machine() == "x86_64" and not has_x86_64_v3():
        pytest.skip("no kernels are loaded on this CPU")
    monkeypatch.setattr(library, "build_library", functools.partial(build_library, sources=sources))
    broken = build_library(tmp_path / "made", sources=sources)
    broken.write_bytes(b"no library")
    loaded = load_library(tmp_path / "made")
    assert loaded is not None
    assert loaded.path == broken
    assert loaded.function("seven", ctypes.c_int, [])() == 7


def test_the_image_has_its_kernels_before_it_loses_its_compiler() -> None:
    dockerfile = (Path(__file__).parents[5] / "ops/Dockerfile").read_text(encoding="utf-8")
    stage = dockerfile[dockerfile.index("build-essential") : dockerfile.rindex("FROM ")]
    assert "build_library(default_folder())" in stage
