"""What the results say: ratios to the peers, the reference's claims beside ours, and the targets, met or missed. Pure.

The invariant: a target is met only by a number that was measured here; what was not measured is said to be so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ops.bench.engine.options import EngineName

Result = dict[str, Any]
CELL = ("workload", "profile", "concurrency")
TRANSFORMERS = (EngineName.GENERATE_BATCH, EngineName.GENERATE)
REFERENCE_BATCH_CUTS, REFERENCE_STREAM_CUTS = 62.0, 80.0  # percent
REFERENCE_INT8_SPEEDUP, REFERENCE_INT8_SAVES = 1.76, 43.0  # times; percent


def ratios(results: Sequence[Result]) -> list[Result]:
    """Return, for each result of ours and each peer's of the same cell, how many times better ours is.

    Rates are ours by theirs, times theirs by ours; `less_…` is the share that ours saves, in percent; memory is
    without what importing takes.
    """
    measured = [each for each in results if "skipped" not in each]
    ours = [each for each in measured if each["engine"] == EngineName.GEA]
    return [
        {
            **{key: own[key] for key in ("precision", *CELL)},
            "against": other["engine"],
            "against_precision": other["precision"],
            **_compared(own, other),
        }
        for own in ours
        for other in measured
        if other["engine"] != EngineName.GEA and all(own[key] == other[key] for key in CELL)
    ]


def _compared(own: Result, other: Result) -> dict[str, float]:
    return {
        "tokens_per_s": _by(own["tokens_per_s"], other["tokens_per_s"]),
        "decode_tokens_per_s": _by(own["decode_tokens_per_s"], other["decode_tokens_per_s"]),
        "ttft_p50": _by(other["ttft_ms"]["p50"], own["ttft_ms"]["p50"]),
        "itl_p50": _by(other["itl_ms"]["p50"], own["itl_ms"]["p50"]),
        "mean_latency": _by(other["latency_ms"]["mean"], own["latency_ms"]["mean"]),
        "less_latency": _less(own["latency_ms"]["mean"], other["latency_ms"]["mean"]),
        "less_memory": _less(own["peak_model_mb"], other["peak_model_mb"]),
        "less_serving_memory": _less(own["serving_model_mb"], other["serving_model_mb"]),
        "less_process_memory": _less(own["peak_memory_mb"], other["peak_memory_mb"]),
    }


def claims(results: Sequence[Result], one_by_one: Sequence[Result]) -> list[Result]:
    """Return the reference's four claims with ours beside them, one row for each precision where it is ours."""
    ours = [each for each in results if each["engine"] == EngineName.GEA and "skipped" not in each]
    return [*_batching(ours, one_by_one), *_streaming(ours), *_eight_bits(ours)]


def _batching(ours: Sequence[Result], one_by_one: Sequence[Result]) -> Iterable[Result]:
    for alone in one_by_one:
        together = [each for each in ours if all(each[key] == alone[key] for key in ("precision", *CELL))]
        for each in together:
            cut = _less(each["latency_ms"]["mean"], alone["latency_ms"]["mean"])
            what = f"a batch of {each['concurrency']} cuts mean latency, {each['precision']}"
            yield {"claim": what, "reference": REFERENCE_BATCH_CUTS, "ours": cut, "unit": "%"}


def _streaming(ours: Sequence[Result]) -> Iterable[Result]:
    for each in ours:
        if each["workload"] == "plain":
            cut = _less(each["ttft_ms"]["p50"], each["latency_ms"]["p50"])
            what = f"streaming cuts the time to the first text, {_cell(each)}"
            yield {"claim": what, "reference": REFERENCE_STREAM_CUTS, "ours": cut, "unit": "%"}


def _eight_bits(ours: Sequence[Result]) -> Iterable[Result]:
    by_cell = {tuple(each[key] for key in ("precision", *CELL)): each for each in ours}
    for (precision, *cell), each in by_cell.items():
        wide = by_cell.get(("fp32", *cell))
        if precision != "int8" or wide is None or each["workload"] != "plain":
            continue
        speed = _by(each["tokens_per_s"], wide["tokens_per_s"])
        saved = _less(each["serving_model_mb"], wide["serving_model_mb"])
        at = f"{each['profile']}, {each['concurrency']} at once"
        yield {
            "claim": f"int8 is faster than fp32, {at}",
            "reference": REFERENCE_INT8_SPEEDUP,
            "ours": speed,
            "unit": "×",
        }
        yield {
            "claim": f"int8 needs less memory than fp32, {at}",
            "reference": REFERENCE_INT8_SAVES,
            "ours": saved,
            "unit": "%",
        }


def targets(results: Sequence[Result], prefill: Sequence[Result]) -> list[Result]:
    """Return each target with what was measured, for each precision of ours: `met` is None where nothing was."""
    found = ratios(results)
    rows = [
        *_at_least(found, EngineName.GENERATE_BATCH, 32, "plain", "tokens_per_s", 8.0),
        *_at_least(found, EngineName.GENERATE_BATCH, 32, "plain", "decode_tokens_per_s", 8.0),
        *_at_least(found, EngineName.LLAMA_CPP, 32, "plain", "tokens_per_s", 1.8),
        *_at_least(found, EngineName.LLAMA_CPP, 32, "plain", "decode_tokens_per_s", 1.8),
        *_at_least(found, EngineName.LLAMA_CPP, 8, "plain", "tokens_per_s", 1.3),
        *_at_least(found, EngineName.LLAMA_CPP, 8, "plain", "decode_tokens_per_s", 1.3),
        *_at_least(found, EngineName.LLAMA_CPP, 1, "plain", "tokens_per_s", None),
        *_at_least(found, EngineName.LLAMA_CPP, 1, "retrieval", "tokens_per_s", 1.0),
    ]
    for ratio in ratios(prefill):
        if ratio["against"] == EngineName.GENERATE:
            rows.append(_target("reads 512 tokens faster than generate", ratio, "ttft_p50", 1.2, "×"))
    for ratio in found:
        if ratio["against"] == EngineName.GENERATE:
            rows.append(_target("mean latency below generate's", ratio, "less_latency", 40.0, "%"))
            rows.append(_target("peak memory below generate's, with loading", ratio, "less_memory", 35.0, "%"))
            rows.append(_target("peak memory below generate's, loaded", ratio, "less_serving_memory", 35.0, "%"))
    return [*rows, *_never_slower([*found, *ratios(prefill)])]


def _at_least(
    found: Sequence[Result], peer: EngineName, concurrency: int, workload: str, key: str, least: float | None
) -> list[Result]:
    """Return one row for each precision of ours, against the peer's fastest number format."""
    what = f"{key.replace('_per_s', '/s').replace('_', ' ')} at {concurrency}, {workload}, by {peer}'s"
    fits = [
        each
        for each in found
        if (each["against"], each["concurrency"], each["workload"]) == (peer, concurrency, workload)
    ]
    if not fits:
        return [{"target": what, "least": least, "ours": None, "unit": "×", "met": None}]
    keys = dict.fromkeys((each["precision"], each["profile"]) for each in fits)
    worst: Callable[[tuple[str, str]], Result] = lambda at: min(  # noqa: E731
        (each for each in fits if (each["precision"], each["profile"]) == at), key=lambda each: float(each[key])
    )
    return [_target(what, worst(at), key, least, "×") for at in keys]


def _target(what: str, ratio: Result, key: str, least: float | None, unit: str) -> Result:
    value = ratio[key]
    against = f"{ratio['against']} {ratio['against_precision']}"
    return {
        "target": what,
        "precision": ratio["precision"],
        "cell": f"{ratio['workload']}, {ratio['profile']}, {ratio['concurrency']} at once",
        "against": against,
        "least": least,
        "ours": value,
        "unit": unit,
        "met": None if least is None else value >= least,
    }


def _never_slower(found: Sequence[Result]) -> list[Result]:
    """Return where each precision of ours fares worst against transformers, in any figure."""
    rows = []
    for precision in dict.fromkeys(each["precision"] for each in found):
        worst = [
            (float(each[key]), key, each)
            for each in found
            for key in ("tokens_per_s", "ttft_p50", "itl_p50", "mean_latency")
            if each["precision"] == precision and each["against"] in TRANSFORMERS and each[key]
        ]
        if worst:
            _, key, each = min(worst, key=lambda item: item[0])
            what = f"never slower than transformers; worst is {key.replace('_', ' ')}"
            rows.append(_target(what, each, key, 1.0, "×"))
    return rows


def _cell(result: Result) -> str:
    return f"{result['precision']}, {result['profile']}, {result['concurrency']} at once"


def _by(better: float, worse: float) -> float:
    return round(better / worse, 2) if worse else 0.0


def _less(own: float, other: float) -> float:
    return round(100 * (1 - own / other), 1) if other else 0.0
