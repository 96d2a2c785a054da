"""The figures of the memory bench as tables, and as plots where matplotlib is there. Knows no model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rich.table import Table

from ops.errors import CommandError

FORMATS = ("svg", "png")
REMEDY = "install it with `.venv/bin/python -m pip install matplotlib`, or leave --out away"


def check_plots() -> None:
    """Raise CommandError if matplotlib is missing: before anything is measured."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--out: the plots need matplotlib, which is not installed", details=(REMEDY,))


def tables(found: dict[str, Any]) -> list[Table]:
    """Return one table for each part, the conditions last."""
    return [
        _weights(found["weights"]),
        _files(found["files"]),
        _growth(found["growth"]),
        _budget(found["budget"]),
        _pairs("waste", found["waste"]),
        _pairs("conditions", found["conditions"]),
    ]


def save_plots(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write each plot as SVG and PNG and return the files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, draw in {"growth": _draw_growth, "budget": _draw_budget, "weights": _draw_weights}.items():
        figure = Figure(figsize=(7, 4), layout="constrained")
        draw(figure.subplots(), found[name])
        for form in FORMATS:
            files.append(folder / f"{name}.{form}")
            figure.savefig(files[-1])
    return files


def _draw_growth(axes: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        (line,) = axes.plot(row["output_tokens"], row["paged_mb"], label=f"paged, {row['kv_precision']}")
        label = f"contiguous, {row['kv_precision']}"
        axes.axhline(row["contiguous_mb"], linestyle="--", color=line.get_color(), label=label)
    axes.set(xlabel="tokens of the answer", ylabel="MB of keys and values", title="One sequence, prompt of 128 tokens")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _draw_budget(axes: Any, rows: list[dict[str, Any]]) -> None:
    names = [row["kv_precision"] for row in rows]
    for offset, key in enumerate(("sequences", "sequences_contiguous")):
        places = [at + 0.4 * offset for at in range(len(rows))]
        bars = axes.bar(places, [row[key] for row in rows], width=0.4, label=("paged", "contiguous")[offset])
        axes.bar_label(bars)
    axes.set_xticks([at + 0.2 for at in range(len(rows))], names)
    axes.set(ylabel="sequences at once", title=f"{rows[0]['profile']} within {rows[0]['budget_mb']:g} MB")
    axes.legend()


def _draw_weights(axes: Any, rows: list[dict[str, Any]]) -> None:
    bars = axes.bar([row["precision"] for row in rows], [row["weights_mb"] for row in rows])
    axes.bar_label(bars)
    axes.set(ylabel="MB", title="Weights in memory")


def _weights(rows: list[dict[str, Any]]) -> Table:
    table = Table("precision", "weights in memory, MB", title="weights")
    for row in rows:
        table.add_row(row["precision"], f"{row['weights_mb']:g}")
    return table


def _files(rows: list[dict[str, Any]]) -> Table:
    table = Table("file", "MB", title="files that they are read from")
    for row in rows:
        table.add_row(row["file"], f"{row['file_mb']:g}")
    return table


def _growth(rows: list[dict[str, Any]]) -> Table:
    table = Table("KV precision", "answer of 64", "512", "longest", "contiguous", title="KV of one sequence, MB")
    for row in rows:
        by_length = dict(zip(row["output_tokens"], row["paged_mb"], strict=True))
        values = (by_length[64], by_length[512], row["paged_mb"][-1], row["contiguous_mb"])
        table.add_row(row["kv_precision"], *(f"{value:g}" for value in values))
    return table


def _budget(rows: list[dict[str, Any]]) -> Table:
    title = f"within {rows[0]['budget_mb']:g} MB"
    table = Table(
        "KV precision", rows[0]["profile"], "mixed lengths, on average", "contiguous", "longest context", title=title
    )
    for row in rows:
        keys = ("sequences", "sequences_mixed", "sequences_contiguous", "longest_context")
        table.add_row(row["kv_precision"], *(f"{row[key]:g}" for key in keys))
    return table


def _pairs(title: str, values: dict[str, Any]) -> Table:
    table = Table(title, "")
    for key, value in values.items():
        table.add_row(key.replace("_", " "), str(value))
    return table
