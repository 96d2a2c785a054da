"""Rankings of several channels to one: reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009). Pure.

Only places count, so that the scores of the channels need no common scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

K = 60  # the constant of the paper: how slowly a place loses its worth


def reciprocal_rank_fusion(
    rankings: Mapping[str, Sequence[str]], weights: Mapping[str, float] | None = None, *, k: int = K
) -> list[tuple[str, float]]:
    """Return ids with their fused score, best first; equal scores stand in the order of the ids.

    `rankings` holds the ids of each channel, best first; the score of an id is the sum of weight / (k + place) over
    the channels that found it, places counted from 1. A channel without a weight has 1; weight 0 leaves it out.
    """
    scores: dict[str, float] = {}
    for channel in sorted(rankings):  # a fixed order, so that the sums round alike everywhere
        weight = 1.0 if weights is None else weights.get(channel, 1.0)
        if weight <= 0:
            continue
        for place, id_ in enumerate(dict.fromkeys(rankings[channel]), start=1):
            scores[id_] = scores.get(id_, 0.0) + weight / (k + place)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
