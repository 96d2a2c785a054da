from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ops.embedded.cache import cache_folder, make_once


def test_cache_is_named_by_the_environment_first(tmp_path: Path) -> None:
    assert cache_folder({"GEA_CACHE": str(tmp_path / "a"), "XDG_CACHE_HOME": "/x"}) == tmp_path / "a"
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "gea"
    assert cache_folder({}) == Path.home() / ".cache" / "gea"


def test_folder_is_filled_once_and_then_returned(tmp_path: Path) -> None:
    calls: list[Path] = []

    def fill(target: Path) -> None:
        calls.append(target)
        (target / "part").write_text("whole")

    folder = tmp_path / "cache" / "thing"
    assert make_once(folder, fill) == folder
    assert make_once(folder, fill) == folder
    assert (folder / "part").read_text() == "whole"
    assert len(calls) == 1


def test_failed_fill_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "thing"

    def fail(target: Path) -> None:
        (target / "part").write_text("half")
        raise OSError("cut")

    with pytest.raises(OSError, match="cut"):
        make_once(folder, fail)
    assert [each.name for each in tmp_path.iterdir()] == [".thing.lock"]
    assert make_once(folder, lambda target: None) == folder


def test_leftover_of_a_killed_run_is_removed_and_never_taken_for_the_result(tmp_path: Path) -> None:
    leftover = tmp_path / ".thing.abc.part"
    leftover.mkdir()
    (leftover / "half").write_text("half")
    folder = make_once(tmp_path / "thing", lambda target: None)
    assert not leftover.exists()
    assert list(folder.iterdir()) == []


def test_two_at_once_fill_once(tmp_path: Path) -> None:
    folder, entered, go_on, waits = tmp_path / "thing", threading.Event(), threading.Event(), threading.Event()
    calls: list[str] = []

    def say(text: str) -> None:
        assert "waiting for another run" in text
        waits.set()

    def fill(target: Path) -> None:
        calls.append(target.name)
        entered.set()
        assert go_on.wait(10)

    threads = [threading.Thread(target=make_once, args=(folder, fill, say)) for _ in range(2)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    assert waits.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert folder.is_dir()
    assert len(calls) == 1
