"""Which real parts are here: a suite that needs one that is not skips with the reason."""

from __future__ import annotations

import os

import pytest

from ops.embedded import MissingPrerequisiteError, choose_broker, encoder_folder, language_model_folder
from ops.embedded.redis import find_redis


def require_servers() -> None:
    """Skip unless Apache Kafka and Redis can be started here."""
    try:
        find_redis()
        if choose_broker(environ=dict(os.environ)).is_fallback:
            pytest.skip("Apache Kafka cannot run here: Java or Maven is missing")
    except MissingPrerequisiteError as missing:
        pytest.skip(str(missing))


def require_whole_stack() -> None:
    """Skip unless the servers and both models are here; converts the language model if it never was."""
    require_servers()
    try:
        encoder_folder()
        language_model_folder()
    except MissingPrerequisiteError as missing:
        pytest.skip(str(missing))


def stack_environment(home: os.PathLike[str], root: os.PathLike[str]) -> dict[str, str]:
    """Return the environment of a `gea` command with a home of its own and no settings of ours."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("GEA_") or key == "GEA_CACHE"}
    return own | {"GEA_HOME": str(home), "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}
