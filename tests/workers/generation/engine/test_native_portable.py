"""The kernels as a CPU without AVX2 compiles them: the same model, within the rounding of its products."""

from __future__ import annotations

import pytest
import torch

from tests.workers.generation.engine.native_reference import (
    TINY,
    Formats,
    RandomSource,
    make_runner,
    naive_logits,
    random_ids,
    run_in_chunks,
)
from workers.generation.engine.kernels.build import build_library, find_compiler
from workers.generation.engine.kernels.library import Library
from workers.generation.engine.protocol import KVPrecision, Precision

pytestmark = [
    pytest.mark.slow,  # compiles
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]
CASES = {
    Formats(Precision.FP32, KVPrecision.FP32): 2e-4,
    Formats(Precision.BF16, KVPrecision.BF16): 3e-2,
    Formats(Precision.FP16, KVPrecision.FP16): 3e-3,
    Formats(Precision.INT8, KVPrecision.INT8): 6e-1,
}


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(build_library(tmp_path_factory.mktemp("portable"), flags=()))


@pytest.mark.parametrize(("formats", "tolerance"), CASES.items())
def test_the_portable_kernels_equal_the_naive_pass_in_any_chunks(
    portable: Library, formats: Formats, tolerance: float
) -> None:
    ids, source = random_ids(150), RandomSource(TINY)
    runner = make_runner(source, formats, library=portable)
    whole = run_in_chunks(runner, ids, range(10), (150,))
    wanted = naive_logits(source, formats, ids)
    torch.testing.assert_close(whole, wanted, atol=tolerance, rtol=1e-4)
    assert (whole - wanted).abs().mean() < tolerance / 10
    for lengths in ((1,), (100, 7)):
        assert torch.equal(run_in_chunks(runner, ids, range(20, 30), lengths), whole)
