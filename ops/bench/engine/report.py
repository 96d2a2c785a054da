"""The figures of the engine bench as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

RATIOS = {
    "tokens_per_s": "tokens/s",
    "decode_tokens_per_s": "decode",
    "ttft_p50": "TTFT p50",
    "itl_p50": "ITL p50",
    "mean_latency": "mean latency",
}


def tables(found: dict[str, Any]) -> list[Table]:
    """Return one table for each part, the conditions last."""
    shown = [_results("plain and retrieval", found["results"]), _memory(found["results"])]
    if found["prefill"]:
        shown.append(_results("512 prompt tokens alone", found["prefill"]))
    if found["one_by_one"]:
        shown.append(_results("one request after another", found["one_by_one"]))
    return [
        *shown,
        _ratios(found["ratios"]),
        _claims(found["claims"]),
        _targets(found["targets"]),
        _conditions(found["conditions"]),
    ]


def _results(title: str, results: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "what", "engine", "tokens/s (spread)", "decode", "TTFT p50, p99", "ITL p50, p99", "mean latency", "peak MB",
        title=title, caption="ms; ~ broken off and reckoned to its end",
    )  # fmt: skip
    for each in results:
        who = f"{each['engine']} {each['precision']}"
        if "skipped" in each:
            table.add_row(_cell(each), who, each["skipped"])
            continue
        low, high = each["tokens_per_s_spread"]
        mark = "~" if each["is_reckoned"] else ""
        table.add_row(
            _cell(each),
            who,
            f"{mark}{each['tokens_per_s']:.1f} ({low:.1f} to {high:.1f})",
            f"{each['decode_tokens_per_s']:.1f}",
            _pair(each["ttft_ms"]),
            _pair(each["itl_ms"]),
            f"{each['latency_ms']['mean']:.0f}",
            f"{each['peak_memory_mb']:.0f}",
        )
    return table


def _memory(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "what", "engine", "peak", "loaded: peak", "imports", "weights", "KV", "other", title="memory of the process, MB"
    )
    for each in results:
        if "skipped" not in each:
            parts = each["memory_parts_mb"]
            peaks = (each["peak_memory_mb"], each["serving_peak_mb"])
            values = (*peaks, *(parts[key] for key in ("imports", "weights", "kv", "other")))
            drafts = _drafts(each)
            table.add_row(_cell(each), f"{each['engine']} {each['precision']}{drafts}", *(f"{v:.0f}" for v in values))
    return table


def _drafts(result: dict[str, Any]) -> str:
    drafted = result.get("num_draft_tokens", 0)
    return f" ({result['num_accepted_tokens']} of {drafted} drafts taken)" if drafted else ""


def _ratios(ratios: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "what", "ours", "against", *RATIOS.values(), "less memory", "loaded", title="ours against theirs, × better"
    )
    for each in ratios:
        values = (f"{each[key]:.2f}" for key in RATIOS)
        against = f"{each['against']} {each['against_precision']}"
        less = (f"{each[key]:.0f} %" for key in ("less_memory", "less_serving_memory"))
        table.add_row(_cell(each), each["precision"], against, *values, *less)
    return table


def _claims(claims: Sequence[dict[str, Any]]) -> Table:
    table = Table("claim", "reference", "ours", title="the reference's claims beside ours")
    for each in claims:
        table.add_row(each["claim"], f"{each['reference']:g} {each['unit']}", f"{each['ours']:g} {each['unit']}")
    return table


def _targets(targets: Sequence[dict[str, Any]]) -> Table:
    table = Table("target", "ours in", "against", "at least", "measured", "", title="targets")
    for each in targets:
        least = "" if each["least"] is None else f"{each['least']:g} {each['unit']}"
        ours = "not measured" if each["ours"] is None else f"{each['ours']:g} {each['unit']}"
        where = ", ".join(each[key] for key in ("precision", "cell") if key in each)
        table.add_row(each["target"], where, each.get("against", ""), least, ours, _verdict(each))
    return table


def _verdict(target: dict[str, Any]) -> str:
    if target["met"] is None:
        return "stated" if target["ours"] is not None else ""
    return "[green]met[/]" if target["met"] else "[red]missed[/]"


def _conditions(conditions: dict[str, Any]) -> Table:
    table = Table("conditions", "")
    for key, value in conditions.items():
        if isinstance(value, dict):
            value = "\n".join(f"{name}: {each}" for name, each in value.items())
        table.add_row(key, "\n".join(value) if isinstance(value, list) else str(value))
    return table


def _cell(result: dict[str, Any]) -> str:
    return f"{result['workload']}, {result['profile']}, {result['concurrency']}"


def _pair(values: dict[str, float]) -> str:
    return f"{values['p50']:.0f}, {values['p99']:.0f}"
