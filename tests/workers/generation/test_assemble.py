"""The generation pool from its settings, without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from workers.generation.assemble import build_engine
from workers.generation.engine.fake import FakeEngine
from workers.settings import load_settings


def test_the_fake_engine_needs_no_model_folder() -> None:
    settings = load_settings(None, {"GEA_GENERATION_ENGINE": "fake", "GEA_GENERATION_FAKE_PACE_MS": "0"})
    assert isinstance(build_engine(settings, None), FakeEngine)


def test_the_local_engine_without_a_model_folder_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"generation\.model"):
        build_engine(load_settings(None, {}), None)


@pytest.mark.parametrize("value", ["remote", ""])
def test_an_unknown_engine_is_refused_by_name(value: str) -> None:
    with pytest.raises(ConfigError, match=r"generation\.engine"):
        load_settings(None, {"GEA_GENERATION_ENGINE": value})


def test_a_pace_below_nothing_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"generation\.fake_pace_ms"):
        load_settings(None, {"GEA_GENERATION_FAKE_PACE_MS": "-1"})


def test_a_worker_with_the_fake_engine_loads_no_torch() -> None:
    code = (
        "import sys; from workers.__main__ import main; from workers.build import preload;"
        "from workers.generation.assemble import build_engine; from workers.settings import load_settings;"
        "from schemas.worker import Pool; settings = load_settings(None, {'GEA_GENERATION_ENGINE': 'fake'});"
        "preload(Pool.GENERATION, settings); build_engine(settings, None); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], timeout=60).returncode == 0
