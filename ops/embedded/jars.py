"""Java, Maven and the jars of Apache Kafka: found, fetched once, and made quick to start.

The jars are pinned by `pom.xml` beside this file and kept in the cache, in a folder named after the version and the
contents of that file. After the fetch the broker is run once to record a class-data archive (JEP 350), which halves
its start; without the archive everything works, only slower.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ops.embedded.cache import Say, cache_folder, make_once, silent
from ops.embedded.errors import MissingPrerequisiteError, PreparationError

POM = Path(__file__).with_name("pom.xml")
MIN_JAVA = 17  # Kafka 4 brokers, KIP-1013
JAVA_REMEDY = "install a Java runtime 17 or newer (Debian, Ubuntu: apt install default-jre-headless)"
MAVEN_REMEDY = "install Maven (Debian, Ubuntu: apt install maven)"
FETCH_TIMEOUT_S = 900.0
PROGRESS_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Java:
    """A Java runtime that can run the broker."""

    path: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaJars:
    """The jars of one Kafka version, complete."""

    folder: Path
    version: str

    def class_path(self) -> str:
        """Return the jars in a fixed order: the class-data archive is valid for exactly one class path."""
        return os.pathsep.join(str(jar) for jar in sorted(self.folder.glob("*.jar")))

    def archive(self, java: Java) -> Path:
        """Return where the class-data archive for this Java belongs; it may not exist."""
        return self.folder / f"classes-{re.sub(r'[^0-9A-Za-z.]+', '-', java.version)}.jsa"


def find_java(environ: Mapping[str, str] | None = None) -> Java:
    """Return the Java of `JAVA_HOME`, else of the path; raise `MissingPrerequisiteError` if none is new enough."""
    environ = os.environ if environ is None else environ
    home = environ.get("JAVA_HOME")
    at_home = Path(home) / "bin" / "java" if home else None
    path = str(at_home) if at_home and at_home.exists() else shutil.which("java", path=environ.get("PATH"))
    if path is None:
        raise MissingPrerequisiteError(f"Java is missing: {JAVA_REMEDY}")
    answer = subprocess.run([path, "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "((\d+)[^"]*)"', answer.stderr + answer.stdout)
    if answer.returncode or not found:
        raise MissingPrerequisiteError(f"{path} does not run: {JAVA_REMEDY}")
    if int(found[2]) < MIN_JAVA:
        raise MissingPrerequisiteError(f"Java {found[1]} is too old: {JAVA_REMEDY}")
    return Java(path=path, version=found[1])


def find_maven(environ: Mapping[str, str] | None = None) -> str:
    """Return the path of `mvn`; raise `MissingPrerequisiteError` if there is none."""
    environ = os.environ if environ is None else environ
    if path := shutil.which("mvn", path=environ.get("PATH")):
        return path
    raise MissingPrerequisiteError(f"Maven is missing: {MAVEN_REMEDY}")


def kafka_version() -> str:
    """Return the version of Kafka that the pom pins."""
    found = ElementTree.parse(POM).findtext(".//{*}kafka.version")
    assert found, "pom.xml names kafka.version"
    return found


def jars_folder(cache: Path | None = None) -> Path:
    """Return where the jars belong; the folder exists only when they are complete."""
    digest = hashlib.sha256(POM.read_bytes()).hexdigest()[:8]
    return (cache or cache_folder()) / f"kafka-{kafka_version()}-{digest}"


def fetch_jars(cache: Path | None = None, say: Say = silent) -> KafkaJars:
    """Return the jars, fetched with Maven if they are not in the cache. Blocks; safe to run twice at once.

    Raises `MissingPrerequisiteError` without Maven, `PreparationError` when Maven fails.
    """
    folder = make_once(jars_folder(cache), lambda temporary: _run_maven(temporary, say), say)
    return KafkaJars(folder=folder, version=_version_of(folder))


def _run_maven(target: Path, say: Say) -> None:
    command = [
        find_maven(), "--batch-mode", "--strict-checksums", "--no-transfer-progress", "--file", str(POM),
        "dependency:copy-dependencies", f"-DoutputDirectory={target}", "-DincludeScope=runtime",
    ]  # fmt: skip
    started = time.monotonic()
    say(f"fetching Apache Kafka {kafka_version()} with Maven (43 MB)")
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as maven:
        while True:
            try:
                output, _ = maven.communicate(timeout=PROGRESS_S)
                break
            except subprocess.TimeoutExpired:
                elapsed = time.monotonic() - started
                if elapsed > FETCH_TIMEOUT_S:
                    maven.kill()
                say(f"still fetching, {elapsed:.0f} s")
            except BaseException:
                maven.kill()
                raise
    if maven.returncode or not list(target.glob("kafka_*.jar")):
        errors = [line for line in output.splitlines() if "ERROR" in line] or output.splitlines()[-1:]
        raise PreparationError(f"Maven could not fetch Kafka: {' '.join(errors[:1]) or 'no output'}")


def _version_of(folder: Path) -> str:
    (jar,) = folder.glob("kafka_*.jar")
    return jar.stem.partition("-")[2]
