"""From a YAML file and `GEA_…` variables to a tree of keys, which `workers.settings` checks and types.

Knows the names and types of keys from the struct that it is given, not what they mean.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import yaml

from schemas.errors import ConfigError

PREFIX = "GEA_"


def read_tree(path: Path) -> dict[str, Any]:
    """Return the sections of a YAML file as they stand. Raises ConfigError."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        place = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"configuration {path}: not YAML: {place}{error.problem or error.context}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path}: not YAML: {' '.join(str(error).split())}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"configuration {path}: a map of sections is expected")
    return tree


def drop_empty(tree: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Take out the sections that are all comments: their keys have their defaults."""
    for field in msgspec.structs.fields(struct):
        if field.name not in tree or not (isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)):
            continue
        if tree[field.name] is None:
            del tree[field.name]
        elif isinstance(tree[field.name], dict):
            drop_empty(tree[field.name], field.type)


def overlay(tree: dict[str, Any], struct: type[msgspec.Struct], name: str, text: str) -> None:
    """Set the key that a variable names; keys contain underscores, so the schema says where they end.

    Raises ConfigError for a variable that names no key.
    """
    found = _find(struct, name.removeprefix(PREFIX).lower())
    if found is None:
        raise ConfigError(f"configuration: the variable {name} names no key")
    keys, hint = found
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"configuration: {key}: a map of keys is expected")
    tree[keys[-1]] = _scalar(text, hint)


def choices(struct: type[msgspec.Struct], place: str) -> str:
    """Return what the key at a dotted place takes, if that is only a few words; else nothing."""
    found = _find(struct, place.replace(".", "_"))
    kind = found[1] if found else None
    if get_origin(kind) is Literal:
        return f": {', '.join(map(str, get_args(kind)))}"
    return f": {', '.join(kind)}" if isinstance(kind, type) and issubclass(kind, StrEnum) else ""


def _find(struct: type[msgspec.Struct], rest: str) -> tuple[list[str], Any] | None:
    """Return the keys that lead to a setting, and its type."""
    hints = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, hint in hints.items():
        if rest == key:
            return [key], hint
        if rest.startswith(f"{key}_"):
            section = next((t for t in (hint, *get_args(hint)) if isinstance(t, type)), None)
            if section is not None and issubclass(section, msgspec.Struct):
                found = _find(section, rest.removeprefix(f"{key}_"))
                if found:
                    return [key, *found[0]], found[1]
    return None


def _scalar(text: str, hint: Any) -> Any:
    """Read a value as its type wants it: text as it stands, since a password may look like a number or a comment."""
    if hint is str or (str in get_args(hint) and tuple not in (hint, get_origin(hint))):
        return None if text == "null" and hint is not str else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
