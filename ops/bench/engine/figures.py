"""What arrivals of tokens mean: tokens a second, times to the first token and between tokens, latencies. Pure.

Knows times, no engines. A run that was broken off is reckoned to its end at the pace of its decoding; that is marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median

from ops.percentile import nearest_rank

Arrival = tuple[float, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One run. `itl_ms` are the gaps between what a reader got, whether it was one token or several."""

    tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    latency_ms: tuple[float, ...]
    num_measured_tokens: int
    is_reckoned: bool


def figures_of(requests: Sequence[Sequence[Arrival]], max_tokens: int) -> RunFigures:
    """Return the figures of one run of requests that ask for `max_tokens` tokens each; times in ms from its begin."""
    counts = [sum(len(token_ids) for _, token_ids in each) for each in requests]
    firsts = [each[0][0] for each in requests]
    ends = [each[-1][0] for each in requests]
    started_ms, ended_ms = max(firsts), max(ends)
    num_decoded = sum(
        len(token_ids) for each in requests for place, (at, token_ids) in enumerate(each) if place and at > started_ms
    )
    pace = num_decoded / (ended_ms - started_ms) if ended_ms > started_ms else 0.0  # tokens a ms, of all together
    missing = len(requests) * max_tokens - sum(counts)
    rest_ms = missing / pace if missing and pace else 0.0
    is_reckoned = missing > 0
    total_ms = ended_ms + rest_ms
    return RunFigures(
        tokens_per_s=(sum(counts) + (missing if pace else 0)) / total_ms * 1e3,
        decode_tokens_per_s=pace * 1e3,
        ttft_ms=tuple(firsts),
        itl_ms=tuple(later - earlier for each in requests for (earlier, _), (later, _) in pairwise(each)),
        latency_ms=tuple(end if count >= max_tokens else total_ms for end, count in zip(ends, counts, strict=True)),
        num_measured_tokens=sum(counts),
        is_reckoned=is_reckoned,
    )


def summed_up(runs: Sequence[RunFigures]) -> dict[str, object]:
    """Return the figures of a result: medians and spread over the runs, percentiles over all that was measured."""
    rates = [run.tokens_per_s for run in runs]
    return {
        "tokens_per_s": _short(median(rates)),
        "ttft_ms": _percentiles(value for run in runs for value in run.ttft_ms),
        "itl_ms": _percentiles(value for run in runs for value in run.itl_ms),
        "tokens_per_s_spread": [_short(min(rates)), _short(max(rates))],
        "decode_tokens_per_s": _short(median(run.decode_tokens_per_s for run in runs)),
        "latency_ms": {
            "mean": _short(mean(value for run in runs for value in run.latency_ms)),
            **_percentiles(value for run in runs for value in run.latency_ms),
        },
        "num_runs": len(runs),
        "num_measured_tokens": sum(run.num_measured_tokens for run in runs),
        "is_reckoned": any(run.is_reckoned for run in runs),
    }


def _percentiles(values: Iterable[float]) -> dict[str, float]:
    given = list(values) or [0.0]  # answers of one token have no gap
    return {f"p{p}": _short(nearest_rank(given, p / 100)) for p in (50, 99)}


def _short(value: float) -> float:
    return round(value, 2)
