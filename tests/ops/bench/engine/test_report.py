"""The engine bench's tables and conditions: everything measured is shown, and so is what was left out."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from ops.bench.engine.options import PROFILES, EngineName, EngineOptions, Workload
from ops.bench.engine.report import tables
from ops.bench.engine.run import cells, conditions, weights_sha256
from ops.bench.engine.summary import claims, ratios, targets
from tests.ops.bench.engine.results import result
from workers.generation.engine.protocol import Precision

OPTIONS = EngineOptions(
    engines=(EngineName.GEA, EngineName.GENERATE),
    precisions=(Precision.INT8,),
    workloads=(Workload.PLAIN, Workload.RETRIEVAL),
    profiles=(PROFILES["short"], PROFILES["512/128"]),
    concurrency=(1, 8),
    repeats=2,
    limit_s=3.0,
    threads=2,
)
SKIPPED = {
    "engine": "transformers_generate",
    "precision": "fp32",
    "workload": "plain",
    "profile": "2048/512",
    "concurrency": 32,
    "skipped": "its prompts alone would take about 99 s",
}


def test_every_combination_is_a_cell_and_short_ones_come_first() -> None:
    titles = [cell.title for cell in cells(OPTIONS)]
    assert len(titles) == len(set(titles)) == 8
    assert titles[0] == "plain, short, 1 at once"
    assert titles[-1] == "retrieval, 512/128, 8 at once"


def test_conditions_say_what_ran_and_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    given = [
        result(num_draft_tokens=9, num_accepted_tokens=3),
        result("transformers_generate", "fp32", cores_busy_elsewhere=0.9),
    ]
    found = conditions(OPTIONS, tmp_path, [*given, SKIPPED])
    assert found["weights_sha256"] == weights_sha256(tmp_path)[:16]
    assert found["versions"]["transformers_generate"] == "1"
    assert found["disturbed"] == ["transformers_generate fp32, plain short at 8"]
    assert any("99 s" in line for line in found["left_out"])
    assert any("llama_cpp" in line for line in found["left_out"])
    assert json.loads(json.dumps(found)) == found


def test_another_weight_has_another_hash(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = weights_sha256(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weightz")
    assert weights_sha256(tmp_path) != before


def test_tables_show_results_ratios_claims_targets_and_conditions(tmp_path: Path) -> None:
    results = [
        result(num_draft_tokens=9, num_accepted_tokens=3),
        result("transformers_generate", "fp32", tokens_per_s=12.5, is_reckoned=True),
        SKIPPED,
    ]
    found = {
        "conditions": conditions(OPTIONS, tmp_path, results),
        "results": results,
        "prefill": [result(profile="512/1", concurrency=1)],
        "one_by_one": [result(latency=900.0)],
        "ratios": ratios(results),
        "claims": claims(results, [result(latency=900.0)]),
        "targets": targets(results, []),
    }
    console = Console(width=240, record=True, file=StringIO())
    for table in tables(found):
        console.print(table)
    shown = console.export_text()
    for expected in ("~12.5", "99 s", "3 of 9 drafts taken", "8.00", "62 %", "met", "missed", "not measured"):
        assert expected in shown, expected
