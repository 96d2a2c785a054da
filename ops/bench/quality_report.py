"""The figures of the quality bench as tables for people. Pure."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def tables(found: dict[str, Any]) -> list[Table]:
    """Return perplexity, divergence and conditions."""
    return [_perplexity(found["perplexity"]), _divergence(found["divergence"]), _conditions(found["conditions"])]


def _perplexity(rows: list[dict[str, Any]]) -> Table:
    table = Table("weights", "cache", "perplexity", "above fp32", "allowed", "", title="perplexity")
    for row in rows:
        above, limit = f"{row['above_fp32_percent']:+.3f} %", f"{row['limit_percent']:g} %"
        cells = (row["precision"], row["kv_precision"], f"{row['perplexity']:.4f}", above, limit)
        table.add_row(*cells, _verdict(row["met"]))
    return table


def _divergence(rows: list[dict[str, Any]]) -> Table:
    table = Table("at once", "answers compared", "first other token", "", title="int8 against itself alone")
    for row in rows:
        place = row["first_difference"]
        first = f"none in {row['num_tokens']}" if place is None else f"after {place} of {row['num_tokens']}"
        table.add_row(str(row["at_once"]), str(row["num_compared"]), first, _verdict(row["met"]))
    return table


def _conditions(conditions: dict[str, Any]) -> Table:
    table = Table("conditions", "")
    for key, value in conditions.items():
        table.add_row(key, str(value))
    return table


def _verdict(is_met: bool) -> str:
    return "[green]met[/]" if is_met else "[red]missed[/]"
