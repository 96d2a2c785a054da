"""The rules between the packages: who may import whom, and what each package shows.

    schemas <- streams <- workers <- ops        (an arrow is read "is imported by")

Imports are read from the source, also those inside functions and under `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("schemas", "streams", "workers", "ops")
HEAVY = frozenset({"torch", "transformers", "faiss", "safetensors", "tokenizers", "accelerate"})
CLIENT_LIBRARIES = frozenset({"aiokafka", "redis", "kafka"})
# What may be imported outside its package, and why.
HEAVY_EXCEPTIONS = {
    "ops/embedded/models.py",  # converts the packaged weights, inside one function
    "ops/bench/engine/transformers_entrant.py",  # the peer itself, in a process of its own
    "ops/bench/blank_runner.py",  # stands in for a model, so it must give its tensors
}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every imported module, absolute, with its line."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            yield ".".join(part for part in (base, node.module) if part), node.lineno


def breaches(paths: list[Path], forbidden: frozenset[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in paths
        for module, line in imported(path)
        if module.partition(".")[0] in forbidden
    ]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_package_imports_only_those_below_it(layer: str) -> None:
    above = frozenset(LAYERS[LAYERS.index(layer) + 1 :]) | {"tests", "gea"}
    assert breaches(sources(layer), above) == []


def test_torch_and_its_kin_are_imported_by_workers_only() -> None:
    elsewhere = [
        path
        for path in sources("schemas", "streams", "ops")
        if path.relative_to(ROOT).as_posix() not in HEAVY_EXCEPTIONS
    ]
    assert breaches(elsewhere, HEAVY) == []


def test_kafka_and_redis_clients_are_made_in_streams_only() -> None:
    assert breaches(sources("schemas", "workers", "ops"), CLIENT_LIBRARIES) == []


def test_nothing_of_ours_imports_gea() -> None:
    ours = [path for path in sources(*LAYERS, "tests") if not path.is_relative_to(ROOT / "ops" / "gea")]
    assert breaches(ours, frozenset({"gea"})) == []


def test_a_relative_import_counts_as_what_it_means(tmp_path: Path) -> None:
    path = ROOT / "streams" / "example.py"
    node = ast.parse("from ..workers import x").body[0]
    assert isinstance(node, ast.ImportFrom)
    assert node.level == 2
    package = path.relative_to(ROOT).parts[:-1]
    assert ".".join(package[: len(package) - node.level + 1]) == ""


def with_all() -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).parts[:-1])
        for path in sources(*LAYERS)
        if path.name == "__init__.py" and "__all__" in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("name", with_all())
def test_all_is_sorted_and_is_the_public_namespace(name: str) -> None:
    package = importlib.import_module(name)
    public = {
        key
        for key, value in vars(package).items()
        if not key.startswith("_") and key != "annotations" and not isinstance(value, types.ModuleType)
    }
    assert list(package.__all__) == sorted(package.__all__)
    assert {each for each in package.__all__ if not each.startswith("__")} == public
