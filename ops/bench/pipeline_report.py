"""The figures of the pipeline bench as tables for people. Pure."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from ops.bench.pipeline_race import MODES


def tables(found: dict[str, Any]) -> list[Table]:
    """Return one table for each part, the conditions last."""
    return [_load(found["load"]), _idle(found["idle"]), _work(found["work"]), _conditions(found["conditions"])]


def _load(load: dict[str, float]) -> Table:
    table = Table("under load", "figure")
    for key, value in load.items():
        table.add_row(key.replace("_", " "), f"{value:g}")
    return table


def _idle(idle: dict[str, Any]) -> Table:
    table = Table("idle, ms", "Kafka p50", "p99", "in process p50", "p99")
    rows = {"first text": idle["ttft_ms"], **idle["hops_ms"]}
    for name, row in rows.items():
        values = (row["kafka"]["p50"], row["kafka"]["p99"], row["in_process"]["p50"], row["in_process"]["p99"])
        table.add_row(name.replace("_", " → "), *(f"{value:g}" for value in values))
    added = idle["ttft_added_ms"]
    table.add_row("added to the first text", f"{added['p50']:g}", f"{added['p99']:g}", "", "")
    return table


def _work(work: dict[str, Any]) -> Table:
    table = Table("items/s", *MODES, "ours : best peer", "spread")
    for name, row in work.items():
        cells = [_rate(row.get(entrant)) for entrant in MODES]
        ratio = f"{row['ratio']:g} ({row['best_peer']})" if "ratio" in row else ""
        spread = " to ".join(f"{value:g}" for value in row.get("ratio_spread", ()))
        table.add_row(name.replace("_", " "), *cells, ratio, spread)
    return table


def _rate(figures: dict[str, float] | None) -> str:
    return f"{figures['items_per_s']:g} ({figures['min']:g} to {figures['max']:g})" if figures else ""


def _conditions(conditions: dict[str, Any]) -> Table:
    table = Table("conditions", "")
    for key, value in conditions.items():
        shown = ", ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(key, shown)
    return table
