"""Equal plans have equal fingerprints, in every process; whatever shapes the text changes them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from schemas.request import Strategy
from schemas.retrieval import Passage
from workers.generation.engine import SamplingParams
from workers.generation.engine.protocol import ConstraintKind, ConstraintSpec
from workers.generation.planning import fingerprint
from workers.generation.strategies import FixedPiece, Plan

SAMPLING = SamplingParams(
    logit_bias={3: 1.0, 70_000: -2.0}, stop_token_ids=frozenset({9, 70_001, 4}), stop=("a",), seed=2**63 - 1
)
PLAN = Plan(strategy=Strategy.DIALOGUE, sampling=SAMPLING, prompt=(1, 2, 3))


def test_the_order_in_which_a_plan_was_made_does_not_matter() -> None:
    turned = replace(SAMPLING, logit_bias={70_000: -2.0, 3: 1.0}, stop_token_ids=frozenset([4, 70_001, 9]))
    assert fingerprint(PLAN) == fingerprint(replace(PLAN, sampling=turned, prompt_text="for people"))


def test_another_process_finds_the_same() -> None:
    code = (
        "from tests.workers.generation.test_planning import PLAN\n"
        "from workers.generation.planning import fingerprint\n"
        "print(fingerprint(PLAN))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == fingerprint(PLAN)


@pytest.mark.parametrize(
    "changed",
    [
        {"prompt": (1, 2)},
        {"prompt": None},
        {"strategy": Strategy.CONTINUATION},
        {"pieces": (FixedPiece(text="a", token_ids=(1,)),)},
        {"passages": (Passage(text="a", passage_id="1"),)},
        {"may_publish": bool},
        *({"sampling": replace(SAMPLING, **field)} for field in (
            {"max_tokens": 3}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1},
            {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1},
            {"logit_bias": {3: 1.1}}, {"seed": 1}, {"stop": ()}, {"stop_token_ids": frozenset({9})},
            {"logprobs": 1}, {"n": 2}, {"constraint": ConstraintSpec(kind=ConstraintKind.JSON_OBJECT)},
            {"constraint": ConstraintSpec(kind=ConstraintKind.REGEX, value="a")},
            {"constraint": ConstraintSpec(kind=ConstraintKind.REGEX, value="b")},
        )),
    ],
)  # fmt: skip
def test_whatever_shapes_the_text_changes_the_fingerprint(changed: dict[str, Any]) -> None:
    assert fingerprint(replace(PLAN, **changed)) != fingerprint(PLAN)
