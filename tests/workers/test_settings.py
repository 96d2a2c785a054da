"""The configuration: every key is checked and named, variables lie over the file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import yaml

import ops
from schemas.errors import ConfigError
from schemas.worker import Pool
from workers.connect import broker_settings, consumer_limits, store_settings, timeouts
from workers.generation.engine.settings import LocalEngineSettings
from workers.generation.settings import LocalSection
from workers.settings import GenerationSection, Settings, load_settings

CONFIG = Path(ops.__file__).parent / "config"


def write(folder: Path, text: str) -> Path:
    path = folder / "gea.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["prod.yaml", "dev.yaml"])
def test_shipped_configuration_is_valid_for_every_client(name: str) -> None:
    settings = load_settings(CONFIG / name, {})
    assert timeouts(settings.kafka).request_ms <= 10_000
    assert broker_settings(settings.kafka).bootstrap
    assert store_settings(settings.redis).timeout_ms
    assert consumer_limits(settings).batch_size == 8


def test_production_has_the_values_of_the_reference() -> None:
    settings = load_settings(CONFIG / "prod.yaml", {})
    assert (settings.generation.max_length, settings.generation.temperature) == (512, 0.7)
    assert (settings.generation.top_p, settings.generation.repetition_penalty) == (0.9, 1.2)
    assert settings.cache.ttl_s == 300
    assert [settings.resources.of(pool).replicas for pool in Pool] == [1, 2, 3, 4]
    assert (settings.resources.intent_service.cpu_limit, settings.resources.intent_service.mem_limit) == (4, "8Gi")
    assert (settings.resources.retrieval_service.gpu_count, settings.resources.retrieval_service.gpu_type) == (1, "a10")


def test_production_file_shows_every_key() -> None:
    def check(shown: dict[str, object], struct: type[msgspec.Struct], place: str) -> None:
        fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
        assert set(shown) == set(fields), place
        for name, kind in fields.items():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                found = shown[name]
                assert isinstance(found, dict)
                check(found, kind, name)

    check(yaml.safe_load((CONFIG / "prod.yaml").read_text(encoding="utf-8")), Settings, "top level")


def test_production_file_says_the_defaults_of_the_engine() -> None:
    """A key that is left out keeps the value shown."""
    assert load_settings(CONFIG / "prod.yaml", {}).generation == load_settings(None, {}).generation


def test_engine_takes_what_its_own_settings_take() -> None:
    """The configuration and the engine agree on names and defaults, wherever both have them."""
    section, engine = LocalSection(), LocalEngineSettings()
    for name in set(LocalSection.__struct_fields__) & {field.name for field in dataclasses.fields(engine)}:
        assert getattr(section, name) == getattr(engine, name), name
    assert GenerationSection().max_sequences == engine.max_sequences


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("batchin: {}", "batchin"),
        ("batching: {batch_sise: 4}", "batch_sise"),
        ("batching: {batch_size: 0}", "batching.batch_size"),
        ("batching: {batch_size: many}", "batching.batch_size"),
        ("generation: {temperature: 2.5}", "generation.temperature"),
        ("generation: {repetition_penalty: 0}", "generation.repetition_penalty"),
        ("generation: {precision: fp4}", "generation.precision"),
        ("generation: {local: {block_size: 24}}", "generation.local.block_size"),
        ("generation: {local: {backend: vllm}}", "native, torch, transformers"),
        ("generation: {local: {device: tpu}}", "generation.local.device"),
        ("generation: {local: {max_speculative_rows: 0}}", "generation.local.max_speculative_rows"),
        ("generation: {local: {max_speculative_rows: 1025}}", "generation.local.max_speculative_rows"),
        ("generation: {local: {max_batched_tokens: 20}}", "local.max_batched_tokens: 20"),
        ("kafka: {request_timeout_ms: 20000}", "kafka.request_timeout_ms"),
        ("resources: {intent_service: {mem_limit: 8GB}}", "resources.intent_service.mem_limit"),
        ("logging: {level: loud}", "logging.level"),
        ("kafka: [1]", "kafka"),
        ("- 1", "map of sections"),
        ("a: b: c", "not YAML: line 1: mapping values"),
        ("kafka: [1, 2\n  foo: {", "not YAML: line 2: expected"),
    ],
)
def test_bad_file_stops_the_start_and_names_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        load_settings(write(tmp_path, text), {})


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_settings(tmp_path / "absent.yaml", {})


def test_variables_lie_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "batching: {batch_size: 2, max_wait_ms: 7}")
    environ = {
        "GEA_BATCHING_BATCH_SIZE": "4",
        "GEA_KAFKA_BOOTSTRAP": "broker:1234",
        "GEA_RESOURCES_INTENT_SERVICE_CPU_LIMIT": "3",
        "GEA_REDIS_STATE_URL": "redis://state:1/0",
        "GEA_GENERATION_LOCAL_KV_PRECISION": "int8",
        "GEA_GENERATION_LOCAL_KV_CACHE_TOKENS": "4096",
        "GEA_CACHE": "/somewhere",
        "HOME": "/root",
    }
    settings = load_settings(path, environ)
    assert (settings.batching.batch_size, settings.batching.max_wait_ms) == (4, 7)
    assert settings.kafka.bootstrap == "broker:1234"
    assert settings.resources.intent_service.cpu_limit == 3
    assert settings.redis.state_url == "redis://state:1/0"
    assert (settings.generation.local.kv_precision, settings.generation.local.kv_cache_tokens) == ("int8", 4096)


@pytest.mark.parametrize("name", ["GEA_BATCHIN_BATCH_SIZE", "GEA_BATCHING_BATCH", "GEA_KAFKA_"])
def test_variable_that_names_no_key_stops_the_start(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load_settings(None, {name: "1"})


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("GEA_ROUTER_DEADLINE_S", "7200", r"router: deadline_s: 7200 .* at most max_deadline_s, 3600"),
        ("GEA_OUTLIER_PROBE_S", "900", r"outlier: probe_s: 900 .* at most max_probe_s, 300"),
        ("GEA_ROUTER_PLACEMENT", "random", r"router.placement: .*'random': round_robin, least_load"),
        ("GEA_GENERATION_LOCAL_BLOCK_SIZE", "12", r"local\.block_size: .*12: 8, 16, 32, 64, 128, 256"),
        ("GEA_GENERATION_LOCAL_BLOCK_SIZE", "x", r"local\.block_size: .*: 8, 16, 32, 64, 128, 256"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_what_does(name: str, value: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_settings(None, {name: value})


def test_variable_with_a_bad_value_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"batching\.batch_size"):
        load_settings(None, {"GEA_BATCHING_BATCH_SIZE": "-1"})


def test_password_in_no_repr_of_the_clients_settings() -> None:
    environ = {
        "GEA_KAFKA_SECURITY_PROTOCOL": "SASL_SSL",
        "GEA_KAFKA_SASL_MECHANISM": "SCRAM-SHA-512",
        "GEA_KAFKA_SASL_USERNAME": "gea",
        "GEA_KAFKA_SASL_PASSWORD": "hush-hush",
        "GEA_KAFKA_SSL_CAFILE": "/etc/ca.pem",
        "GEA_REDIS_URL": "rediss://user:hush-hush@redis:6379/0",
        "GEA_REDIS_SSL_CAFILE": "/etc/redis-ca.pem",
    }
    settings = load_settings(None, environ)
    broker, store = broker_settings(settings.kafka), store_settings(settings.redis)
    assert (broker.security.password, broker.security.username) == ("hush-hush", "gea")
    assert broker.security.tls.ca_file == "/etc/ca.pem"
    assert (store.url, store.tls.ca_file) == ("rediss://user:hush-hush@redis:6379/0", "/etc/redis-ca.pem")
    assert "hush" not in repr(broker) + repr(store)
    assert "hush" not in repr(settings)


@pytest.mark.parametrize("password", ["12345", "yes", "null ", "p@ss #1", "#x", "a: b", "[1", "~", "'x"])
def test_text_from_a_variable_is_taken_as_it_stands(password: str) -> None:
    settings = load_settings(None, {"GEA_KAFKA_SASL_PASSWORD": password, "GEA_WORKER_METRICS_PORT": "9100"})
    assert (settings.kafka.sasl_password, settings.worker.metrics_port) == (password, 9100)


def test_a_section_without_keys_is_all_defaults_and_takes_variables(tmp_path: Path) -> None:
    path = tmp_path / "gea.yaml"
    path.write_text("kafka:\n  # bootstrap: a:1\nredis:\n", encoding="utf-8")
    assert load_settings(path, {"GEA_KAFKA_BOOTSTRAP": "b:2"}).kafka.bootstrap == "b:2"
    path.write_text("generation:\n  local:\n    # device: cpu\n", encoding="utf-8")
    assert load_settings(path, {"GEA_GENERATION_LOCAL_DEVICE": "cpu"}).generation.local.device == "cpu"
    path.write_text("kafka: 5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="kafka"):
        load_settings(path, {"GEA_KAFKA_BOOTSTRAP": "b:2"})
