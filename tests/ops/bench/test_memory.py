"""The memory bench: blocks against whole contexts, what a budget holds, and waste, from our own scheduler."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ops.bench.memory import MAX_CONTEXT, MemoryOptions, budget, growth, mixed_lengths, run_memory, waste
from ops.bench.memory_report import check_plots, save_plots, tables
from ops.cli import app
from ops.errors import CommandError
from tests.workers.generation.engine.test_model import save_tiny_model
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision
from workers.generation.engine.settings import Backend


def shape(block_size: int = 16, precision: KVPrecision = KVPrecision.FP16) -> CacheShape:
    return CacheShape(
        num_layers=2, num_kv_heads=1, head_dim=64, num_blocks=1, block_size=block_size, precision=precision
    )


def test_a_sequence_takes_its_blocks_and_a_contiguous_one_its_longest_length() -> None:
    found = growth(shape())
    token_bytes = 2 * 2 * 64 * 2
    assert found["paged_mb"][0] == pytest.approx(128 * token_bytes / 1e6, abs=0.005)
    assert found["paged_mb"] == sorted(found["paged_mb"])
    assert found["paged_mb"][-1] == found["contiguous_mb"] == pytest.approx(MAX_CONTEXT * token_bytes / 1e6, abs=0.005)


def test_a_budget_holds_the_sequences_that_its_blocks_are_enough_for() -> None:
    room = 5 * 640 // 16 * shape().bytes_per_block  # five sequences of 512 + 128 tokens
    found = budget(shape(), room, num_mixed=20)
    assert found["sequences"] == 5
    assert found["sequences_contiguous"] == 5 * 640 // MAX_CONTEXT
    assert found["longest_context"] == 5 * 640
    assert found["sequences_mixed"] > found["sequences_contiguous"]


def test_half_the_bits_hold_about_twice_the_sequences() -> None:
    room = 5 * 640 // 16 * shape().bytes_per_block
    narrow = budget(shape(precision=KVPrecision.INT8), room, num_mixed=1)
    assert narrow["sequences"] in (9, 10)


def test_waste_on_mixed_lengths_is_small_and_grows_with_the_blocks() -> None:
    small, large = waste(shape(), 32), waste(shape(block_size=256), 32)
    assert 0 < small["mean_percent"] < small["target_percent"]
    assert small["met"]
    assert large["mean_percent"] > 5 * small["mean_percent"]
    assert not large["met"]


def test_mixed_lengths_are_the_same_each_time_and_fit() -> None:
    assert mixed_lengths(50) == mixed_lengths(50)
    assert all(16 <= prompt <= 1_024 and 16 <= answer <= 512 for prompt, answer in mixed_lengths(500))


@pytest.mark.slow
def test_all_figures_of_a_tiny_model_and_their_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_tiny_model(tmp_path)
    found = run_memory(MemoryOptions(folder=tmp_path, backend=Backend.TORCH, budget_bytes=16 << 20), lambda text: None)
    assert [row["precision"] for row in found["weights"]] == ["fp32", "bf16", "fp16", "int8"]
    memory = {row["precision"]: row["weights_mb"] for row in found["weights"]}
    assert memory["bf16"] == memory["fp16"] < memory["fp32"]
    files = save_plots(found, tmp_path / "plots")
    assert {file.suffix for file in files} == {".svg", ".png"}
    assert all(file.stat().st_size > 1_000 for file in files)
    console = Console(width=200, record=True, file=StringIO())
    for table in tables(found):
        console.print(table)
    assert "mixed lengths" in console.export_text()


def test_missing_plots_are_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommandError, match="matplotlib") as failed:
        check_plots()
    assert any("pip install" in line for line in failed.value.details)
    answer = CliRunner().invoke(app, ["bench", "memory", "--out", str(tmp_path)])
    assert answer.exit_code == 1
    assert list(tmp_path.iterdir()) == []
