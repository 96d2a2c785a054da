"""compose.yaml: the shape of the reference deployment, and agreement with the production configuration."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
POOLS = {"router": 1, "intent": 2, "retrieval": 3, "generation": 4}
WITH_GPU = ("retrieval", "generation")


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return found


@pytest.fixture(scope="module")
def production() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "ops/config/prod.yaml").read_text())
    return found


@pytest.mark.parametrize(("pool", "replicas"), POOLS.items())
def test_each_pool_runs_its_worker_with_the_replicas_of_the_reference(
    services: dict[str, Any], pool: str, replicas: int
) -> None:
    assert services[pool]["command"] == ["worker", pool, "--colour", "blue"]
    assert services[pool]["deploy"]["replicas"] == replicas


@pytest.mark.parametrize("pool", POOLS)
def test_limits_and_replicas_are_those_of_the_production_configuration(
    services: dict[str, Any], production: dict[str, Any], pool: str
) -> None:
    wanted = production["resources"][f"{pool}_service"]
    deploy = services[pool]["deploy"]
    assert deploy["replicas"] == wanted["replicas"]
    assert float(deploy["resources"]["limits"]["cpus"]) == wanted["cpu_limit"]
    assert deploy["resources"]["limits"]["memory"] + "i" == wanted["mem_limit"]
    gpus = yaml.safe_load((ROOT / "ops/compose.gpu.yaml").read_text())["services"]
    reserved = gpus.get(pool, {}).get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert sum(device["count"] for device in reserved) == wanted["gpu_count"]


@pytest.mark.parametrize("pool", POOLS)
def test_each_worker_asks_for_its_own_health_and_waits_for_topics_and_redis(
    services: dict[str, Any], pool: str
) -> None:
    assert services[pool]["healthcheck"]["test"] == ["CMD", "gea-healthcheck", "--pool", pool, "--local"]
    conditions = {name: wait["condition"] for name, wait in services[pool]["depends_on"].items()}
    assert conditions == {
        "topics": "service_completed_successfully",
        "redis": "service_healthy",
        "redis-state": "service_healthy",
    }


def test_topics_are_made_once_and_before_the_knowledge(services: dict[str, Any]) -> None:
    assert services["topics"]["command"] == ["topics", "apply"]
    assert services["topics"]["depends_on"]["kafka"]["condition"] == "service_healthy"
    assert services["knowledge"]["depends_on"]["topics"]["condition"] == "service_completed_successfully"
    for once in ("topics", "knowledge"):
        assert services[once].get("restart", "no") == "no"
    source = services["knowledge"]["volumes"][0].split(":")[0]
    assert (ROOT / source).is_dir()


def test_the_two_roles_of_redis_are_apart(services: dict[str, Any]) -> None:
    evictable, state = (" ".join(services[name]["command"]) for name in ("redis", "redis-state"))
    assert "allkeys-lru" in evictable
    assert "noeviction" in state
    assert "--appendonly yes" in state
    assert services["redis-state"]["volumes"]
    environment = services["generation"]["environment"]
    assert environment["GEA_REDIS_URL"] == "redis://redis:6379/0"
    assert environment["GEA_REDIS_STATE_URL"] == "redis://redis-state:6379/0"


def test_every_dependency_is_a_service_and_every_server_has_a_health_check(services: dict[str, Any]) -> None:
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
    for server in ("kafka", "redis", "redis-state", *POOLS):
        assert services[server]["healthcheck"]["test"]


def test_workers_get_more_time_to_stop_than_they_need_to_drain(
    services: dict[str, Any], production: dict[str, Any]
) -> None:
    for pool in POOLS:
        assert float(services[pool]["stop_grace_period"].removesuffix("s")) > production["worker"]["drain_s"]


def test_settings_of_the_containers_are_known_ones(services: dict[str, Any]) -> None:
    from workers.settings import load_settings

    environment = services["generation"]["environment"]
    config = ROOT / "ops/config" / Path(environment["GEA_CONFIG"]).name
    settings = load_settings(config, environment)
    assert settings.kafka.bootstrap == "kafka:9094"
    assert settings.kafka.replication == 1


def test_what_the_image_copies_is_there() -> None:
    dockerfile = (ROOT / "ops/Dockerfile").read_text()
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", dockerfile, re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "ops/compose.gpu.yaml")])
def test_a_validator_accepts_it(files: tuple[str, ...]) -> None:
    command = validator()
    if command is None:
        pytest.skip("neither docker-compose nor docker compose is installed")
    options = [option for name in files for option in ("--file", str(ROOT / name))]
    answer = subprocess.run(
        [*command, *options, "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COMPOSE_PROJECT_NAME": "gea"},
    )
    assert answer.returncode == 0, answer.stderr


def validator() -> list[str] | None:
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    plugin = ["docker", "compose"]
    if shutil.which("docker") and not subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode:
        return plugin
    return None
