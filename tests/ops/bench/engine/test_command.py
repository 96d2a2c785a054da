"""`gea bench engine` before anything runs: wrong use is one clear line, and a JSON object if asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ops.cli import app


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--precision", "fp8"], "fp32, bf16, fp16, int8"),
        (["--profile", "long"], "512/128"),
        (["--workload", "chat"], "plain, retrieval"),
        (["--engines", "vllm"], "transformers_generate_batch"),
        (["--llama", "q2"], "q4_1, q8_0"),
    ],
)
def test_what_is_not_known_is_named(arguments: list[str], expected: str) -> None:
    answer = CliRunner().invoke(app, ["bench", "engine", "--engines", "gea", *arguments, "--json"])
    assert answer.exit_code == 1
    assert expected in json.loads(answer.stdout.splitlines()[-1])["error"]["message"]


def test_llama_cpp_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    arguments = ["bench", "engine", "--engines", "llama_cpp", "--peers-python", str(tmp_path / "python"), "--json"]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 1
    assert "llama-cpp-python" in json.loads(answer.stdout.splitlines()[-1])["error"]["message"]
