"""The generation pool from its settings, without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from schemas.errors import ConfigError
from workers.generation.assemble import build_engine, local_settings
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.protocol import Precision
from workers.generation.engine.settings import Backend
from workers.settings import load_settings


def test_the_fake_engine_needs_no_model_folder() -> None:
    settings = load_settings(None, {"GEA_GENERATION_ENGINE": "fake", "GEA_GENERATION_FAKE_PACE_MS": "0"})
    assert isinstance(build_engine(settings, None), FakeEngine)


def test_the_local_engine_without_a_model_folder_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"generation\.model"):
        build_engine(load_settings(None, {}), None)


def test_the_local_engine_gets_what_the_configuration_says() -> None:
    environ = {
        "GEA_GENERATION_PRECISION": "int8",
        "GEA_GENERATION_MAX_SEQUENCES": "5",
        "GEA_GENERATION_LOCAL_BACKEND": "native",
        "GEA_GENERATION_LOCAL_KV_CACHE_TOKENS": "4096",
        "GEA_GENERATION_LOCAL_MAX_SWAP_MB": "3",
        "GEA_GENERATION_LOCAL_PREFIX_CACHE": "false",
        "GEA_RESOURCES_GENERATION_SERVICE_CPU_LIMIT": "2",
        "GEA_RESOURCES_GENERATION_SERVICE_MEM_LIMIT": "512Mi",
    }
    found = local_settings(load_settings(None, environ))
    assert (found.precision, found.backend, found.max_sequences) == (Precision.INT8, Backend.NATIVE, 5)
    assert (found.kv_cache_tokens, found.max_swap_bytes, found.prefix_cache) == (4_096, 3 << 20, False)
    assert (found.num_threads, found.memory_limit_bytes) == (2, 512 << 20)


@pytest.mark.parametrize(
    ("gpu_count", "wanted", "device"), [("0", "auto", "cpu"), ("1", "auto", "auto"), ("0", "cuda:1", "cuda:1")]
)
def test_the_device_is_the_cpu_unless_resources_or_the_setting_say_otherwise(
    gpu_count: str, wanted: str, device: str
) -> None:
    environ = {
        "GEA_RESOURCES_GENERATION_SERVICE_GPU_COUNT": gpu_count,
        "GEA_GENERATION_LOCAL_DEVICE": wanted,
    }
    assert local_settings(load_settings(None, environ)).device == device


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
