"""ops/run on machines that lack something. Nothing is installed here: only its decisions are looked at."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "ops" / "run"
BASH = shutil.which("bash")
TOOLS = ("bash", "cat", "cksum", "dirname", "env", "head", "sed")

pytestmark = pytest.mark.skipif(BASH is None, reason="bash is missing")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return the only folder on the path of a machine with little more than bash."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    return folder


def add(machine: Path, name: str, line: str) -> None:
    (machine / name).write_text(f"#!/bin/sh\n{line}\n")
    (machine / name).chmod(0o755)


def add_java(machine: Path, version: str) -> None:
    add(machine, "java", f"echo 'openjdk version \"{version}\" 2024' >&2")


def call(machine: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BASH), "-c", f"source {RUN}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(machine), "HOME": str(machine)} | variables,
    )


def test_help_names_the_two_commands_and_sets_nothing_up(machine: Path) -> None:
    answer = subprocess.run([str(BASH), str(RUN), "--help"], capture_output=True, text=True, env={"PATH": str(machine)})
    assert answer.returncode == 0
    assert "ops/run demo" in answer.stdout
    assert "ops/run test" in answer.stdout
    assert answer.stderr == ""


def test_missing_java_and_maven_are_named_in_one_line_each_with_the_remedy(machine: Path) -> None:
    answer = call(machine, "can_run_kafka")
    assert answer.returncode == 1
    java, maven = answer.stderr.splitlines()
    assert java.startswith("missing: Java. Install")
    assert "apt install" in java
    assert maven.startswith("missing: Maven.")
    assert "apt install" in maven
    assert answer.stdout == ""


@pytest.mark.parametrize(("version", "shown"), [("11.0.2", "11"), ("1.8.0_292", "8")])
def test_old_java_is_named_with_its_version(machine: Path, version: str, shown: str) -> None:
    add_java(machine, version)
    add(machine, "mvn", "exit 0")
    answer = call(machine, "can_run_kafka")
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"too old: Java {shown}. Install")
    assert len(answer.stderr.splitlines()) == 1


@pytest.mark.parametrize("version", ["17.0.15", "21", "25-ea"])
def test_machine_with_java_and_maven_runs_kafka_without_a_word(machine: Path, version: str) -> None:
    add_java(machine, version)
    add(machine, "mvn", "exit 0")
    answer = call(machine, "can_run_kafka")
    assert (answer.returncode, answer.stderr) == (0, "")


def test_asking_for_tansu_skips_java_and_maven_without_a_word(machine: Path) -> None:
    answer = call(machine, "can_run_kafka", GEA_BROKER="tansu")
    assert (answer.returncode, answer.stderr) == (1, "")


def test_without_java_the_models_are_still_made_and_the_broker_is_tansu(machine: Path) -> None:
    answer = call(machine, 'prepare() { echo "prepare $*"; }; set_up_parts; echo "$GEA_BROKER"')
    assert answer.returncode == 0
    assert answer.stdout.split("\n") == ["prepare models", "tansu", ""]
    assert "without guarantees" in answer.stderr


def test_kafka_that_cannot_be_fetched_gives_way_to_tansu_and_is_reported(machine: Path) -> None:
    add_java(machine, "17.0.1")
    add(machine, "mvn", "exit 0")
    failing = 'prepare() { [[ $1 != kafka ]]; }; set_up_parts; echo "$GEA_BROKER $parts_failed"'
    answer = call(machine, failing)
    assert answer.stdout == "tansu 1\n"
    assert "this time the broker is Tansu" in answer.stderr


def test_failing_models_end_the_run(machine: Path) -> None:
    answer = call(machine, "prepare() { false; }; set_up_parts; echo went on", GEA_BROKER="tansu")
    assert answer.returncode == 1
    assert answer.stdout == ""


def test_missing_python_is_the_one_that_ends_the_run(machine: Path) -> None:
    code = "venv=/nonexistent/.venv; python=$venv/bin/python; make_environment; echo went on"
    answer = call(machine, code)
    assert answer.returncode == 1
    assert answer.stdout == ""
    assert answer.stderr.startswith("missing: Python 3.11 or newer. Install it")
    assert len(answer.stderr.splitlines()) == 1


def test_first_python_that_runs_and_is_new_enough_is_taken(machine: Path) -> None:
    add(machine, "python3", "exit 1")  # too old, or a shim that leads nowhere
    add(machine, "python3.12", "exit 0")
    answer = call(machine, "find_python")
    assert answer.stdout.strip() == str(machine / "python3.12")


def test_environment_is_made_again_when_requirements_change_and_only_then(machine: Path, tmp_path: Path) -> None:
    add(machine, "cp", "exit 0")
    for name in ("lock", "models", "uv"):
        (tmp_path / "requirements").mkdir(exist_ok=True)
        (tmp_path / "requirements" / f"{name}.txt").write_text("a==1\n")
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("python", "gea"):
        add(bin_folder, name, "exit 0")
    places = f"requirements={tmp_path}/requirements; venv={tmp_path}/venv; python=$venv/bin/python; stamp=$venv/stamp;"
    assert call(machine, f"{places} is_ready").returncode != 0
    assert call(machine, f"{places} fingerprint >$stamp; is_ready").returncode == 0
    (tmp_path / "requirements" / "models.txt").write_text("a==2\n")
    assert call(machine, f"{places} is_ready").returncode != 0


def test_marks_of_the_quick_tests_leave_out_all_that_needs_real_parts(machine: Path, tmp_path: Path) -> None:
    add(machine, "python", 'printf "%s\\n" "$@"')
    show = f"root={tmp_path}; python={machine}/python; run_tests"
    quick = call(machine, f"{show} -k word").stdout.splitlines()
    assert quick[:3] == ["-m", "pytest", "-m"]
    for mark in ("kafka", "redis", "model", "browser", "chaos", "slow", "gpu"):
        assert mark in quick[3]
    assert quick[-2:] == ["-k", "word"]
    everything = call(machine, f"{show} --all -x").stdout.splitlines()
    spread = ["-n", "2", "--dist", "loadscope", "--no-loadscope-reorder"]
    assert everything == ["-m", "pytest", "-m", "not (gpu or soak)", *spread, "-x"]


def test_what_is_named_by_its_path_runs_in_one_process(machine: Path, tmp_path: Path) -> None:
    add(machine, "python", 'printf "%s\\n" "$@"')
    (tmp_path / "test_it.py").touch()
    show = f"root={tmp_path}; python={machine}/python; run_tests"
    for named in ("test_it.py", "test_it.py::test_one[a b]"):
        assert call(machine, f"{show} '{named}' -s").stdout.splitlines()[4:] == [named, "-s"]
        assert call(machine, f"{show} --all '{named}'").stdout.splitlines()[4:] == [named]
    for word in ("test_it", "test_it.py"):  # an expression names no path, even where there is one
        assert "-n" in call(machine, f"{show} -k {word}").stdout.splitlines()


def test_script_is_executable_and_holds_no_address() -> None:
    assert os.access(RUN, os.X_OK)
    assert "://" not in RUN.read_text()
