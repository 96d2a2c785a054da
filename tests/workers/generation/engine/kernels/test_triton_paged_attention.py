from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.workers.generation.engine.cuda_model import answers, reference
from tests.workers.generation.engine.kernels.paged_cases import (
    CASES,
    FEW,
    LENGTHS,
    LONE_ROWS,
    LONG_LENGTHS,
    Case,
    alone,
    inputs,
    naive,
    run,
)

pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
Results = tuple[dict[str, torch.Tensor], dict[str, str], list[tuple[int, ...]]]
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}  # a few units in the last place, around 1


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the kernel gives on the CPU, what trials of it find wrong, and what a model answers over it."""
    path = tmp_path_factory.mktemp("triton") / "results.pt"
    module = "tests.workers.generation.engine.kernels.paged_cases"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", module, str(path)], check=True, env=environment, cwd=Path.cwd(), timeout=100)
    results: Results = torch.load(path)
    return results


@pytest.fixture(scope="module")
def interpreted(child: Results) -> dict[str, torch.Tensor]:
    """What the kernel gives on the CPU."""
    return child[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_attention_equals_the_naive_loop(case: Case, interpreted: dict[str, torch.Tensor]) -> None:
    within = ROUNDING[case.dtype]
    torch.testing.assert_close(interpreted[str(case)].float(), naive(case, inputs(case)), atol=within, rtol=within)


@pytest.mark.slow
@pytest.mark.parametrize("row", LONE_ROWS)
def test_neighbours_never_change_a_row(row: int, interpreted: dict[str, torch.Tensor]) -> None:
    assert torch.equal(interpreted[f"alone-{row}"][0], interpreted[str(CASES[1])][row])


@pytest.mark.slow
def test_row_without_context_is_zero(interpreted: dict[str, torch.Tensor]) -> None:
    assert not interpreted[str(CASES[0])][LENGTHS.index(0)].any()


@pytest.mark.slow
def test_trial_finds_nothing_wrong(child: Results) -> None:
    assert child[1] == {"fp32": "", "bf16": "", "fp16": "", "int8": ""}


@pytest.mark.slow
def test_model_over_the_kernel_answers_as_the_reference(child: Results) -> None:
    assert child[2] == answers(reference(), **FEW)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_attention_equals_the_naive_loop(case: Case) -> None:
    given, within = inputs(case, lengths=LONG_LENGTHS), max(ROUNDING[case.dtype], 1e-5)  # three products of TF32
    mixed = run(case, given.to("cuda"), max_length=max(LONG_LENGTHS)).cpu().float()
    torch.testing.assert_close(mixed, naive(case, given), atol=within, rtol=within)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("row", LONE_ROWS)
def test_neighbours_never_change_a_row_on_the_device(row: int) -> None:
    given, length = alone(CASES[1], row)
    together = run(CASES[1], inputs(CASES[1]).to("cuda"))
    assert torch.equal(run(CASES[1], given.to("cuda"), max_length=length)[0], together[row])
