"""TLS and SASL on a real broker: whoever has the certificate and the password gets in, nobody else."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from ops.embedded import EmbeddedKafka, MissingPrerequisiteError
from ops.embedded.process import free_ports
from schemas.errors import GeaError
from streams.broker import TopicSpec
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings, Protocol, Security, Timeouts, Tls

pytestmark = pytest.mark.kafka

PASSWORD = "correct horse"
TIMEOUTS = Timeouts(request_ms=5_000, send_ms=6_000, close_ms=3_000, session_ms=4_000, heartbeat_ms=500)
JAAS = "org.apache.kafka.common.security.plain.PlainLoginModule required"


@dataclass(frozen=True, slots=True)
class SecureKafka:
    address: str
    ca_file: str

    def broker(self, *, password: str = PASSWORD, ca_file: str | None = None) -> KafkaBroker:
        security = Security(
            protocol=Protocol.SASL_SSL,
            mechanism="PLAIN",
            username="gea",
            password=password,
            tls=Tls(ca_file=ca_file or self.ca_file, is_hostname_checked=False),
        )
        return KafkaBroker(BrokerSettings(bootstrap=self.address, security=security), TIMEOUTS)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate and one file with key and certificate, as Kafka's PEM keystore wants them."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is missing: no certificate can be made")
    key, cert = folder / f"{name}.key", folder / f"{name}.crt"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files]
    subprocess.run([*command, *subject], check=True, capture_output=True)
    store = folder / f"{name}.pem"
    store.write_text(key.read_text() + cert.read_text())
    return cert, store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure_kafka(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureKafka]:
    folder = tmp_path_factory.mktemp("secure")
    cert, store = certificate(folder, "broker")
    (port,) = free_ports(1)
    extra = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL",
        "inter.broker.listener.name": "PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.secure.sasl.enabled.mechanisms": "PLAIN",
        "listener.name.secure.plain.sasl.jaas.config": f'{JAAS} user_gea="{PASSWORD}";',
        "listener.name.secure.ssl.keystore.type": "PEM",
        "listener.name.secure.ssl.keystore.location": str(store),
    }
    kafka = EmbeddedKafka(folder / "kafka", extra_listener=f"SECURE://127.0.0.1:{port}", extra=extra)
    try:
        await kafka.start()
    except MissingPrerequisiteError as error:
        pytest.skip(str(error))
    try:
        yield SecureKafka(f"127.0.0.1:{port}", str(cert))
    finally:
        await kafka.stop()


async def test_certificate_and_password_let_producer_reader_and_admin_in(secure_kafka: SecureKafka) -> None:
    async with secure_kafka.broker() as broker:
        assert await broker.create_topics([TopicSpec(name="t", num_partitions=1)]) == ["t"]
        producer = await broker.producer()
        written = await producer.send("t", b"hello", partition=0)
        reader = await broker.reader({written.place: 0})
        records = await reader.poll(timeout_ms=5_000)
        await reader.close()
        await producer.close()
    assert [record.value for record in records] == [b"hello"]


async def test_a_wrong_password_keeps_us_out_and_is_never_shown(secure_kafka: SecureKafka) -> None:
    async with secure_kafka.broker(password="battery staple") as broker:
        with pytest.raises(GeaError, match="login and certificate") as caught:
            await broker.producer()
    assert "battery staple" not in caught.value.message


async def test_another_certificate_keeps_us_out(secure_kafka: SecureKafka, tmp_path: Path) -> None:
    other, _ = certificate(tmp_path, "other")
    async with secure_kafka.broker(ca_file=str(other)) as broker:
        with pytest.raises(GeaError):
            await broker.producer()
