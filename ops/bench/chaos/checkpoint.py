"""What a long run has done so far, in one JSON file: an interrupted run goes on behind its last whole round."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ops.bench.chaos.result import RoundResult
from ops.errors import CommandError

VERSION = 1


def load_rounds(path: Path, conditions: Mapping[str, Any]) -> list[RoundResult]:
    """Return the rounds that are done; none if there is no file. Raises CommandError for one of another run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CommandError(f"--checkpoint: {path} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("version") != VERSION or not isinstance(found.get("rounds"), list):
        raise CommandError(f"--checkpoint: {path} is no checkpoint of this bench")
    known = found.get("conditions")
    differing = [key for key in conditions if not isinstance(known, dict) or known.get(key) != conditions[key]]
    if differing:
        raise CommandError(f"--checkpoint: {path} is of a run with another {', '.join(differing)}: name another file")
    try:
        return [RoundResult(**each) for each in found["rounds"]]
    except TypeError as error:
        raise CommandError(f"--checkpoint: {path} is no checkpoint of this bench: {error}") from error


def save_rounds(path: Path, conditions: Mapping[str, Any], rounds: Sequence[RoundResult]) -> None:
    """Write all rounds; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    done = {"version": VERSION, "conditions": dict(conditions), "rounds": [dataclasses.asdict(each) for each in rounds]}
    part.write_text(json.dumps(done), encoding="utf-8")
    part.replace(path)
