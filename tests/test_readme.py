"""The README's tree names every module, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("schemas", "streams", "workers", "ops")


def tree() -> str:
    """Return the drawing of the tree."""
    (drawn,) = re.findall(r"^## Structure\n.*?```\n(.*?)```", README, flags=re.DOTALL | re.MULTILINE)
    assert isinstance(drawn, str)
    return drawn


def test_tree_names_every_module() -> None:
    modules = {path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py")} - {"__init__.py"}
    missing = {name for name in modules if not re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", tree())}
    assert missing == set()


def test_tree_names_nothing_that_is_gone() -> None:
    present = {path.name for path in ROOT.rglob("*") if ".venv" not in path.parts}
    named = set(re.findall(r"(?<![\w./])[\w.-]+\.(?:py|yaml|xml|toml)\b", tree()))
    assert named - present == set()


def test_commands_of_the_readme_exist() -> None:
    from ops.cli import app

    groups = {group.name for group in app.registered_groups}
    commands = {
        command.name or (command.callback.__name__ if command.callback else "") for command in app.registered_commands
    }
    named = set(re.findall(r"(?:`gea|ops/run) ([a-z]+)", README)) - {"test", "setup"}
    assert named - groups - commands == set()
