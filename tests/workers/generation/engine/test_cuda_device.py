from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from schemas.errors import ConfigError
from workers.generation.engine.cuda_device import check_precision, flags, refuse_precision, set_flags
from workers.generation.engine.protocol import Precision
from workers.generation.engine.settings import LocalEngineSettings


@pytest.fixture(autouse=True)
def flags_as_before() -> Iterator[None]:
    """The flags are the process's: the tests after these see them as they were."""
    before, convolutions = flags(), torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before.tf32
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.backends.cuda.enable_flash_sdp(before.flash_sdp)
    torch.backends.cuda.enable_mem_efficient_sdp(before.mem_efficient_sdp)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("mem_efficient", [True, False])
def test_flags_are_set_and_reported(tf32: bool, flash: bool, mem_efficient: bool) -> None:
    settings = LocalEngineSettings(tf32=tf32, enable_flash_sdp=flash, enable_mem_efficient_sdp=mem_efficient)
    found = set_flags(settings)
    assert (found.tf32, found.flash_sdp, found.mem_efficient_sdp) == (tf32, flash, mem_efficient)
    assert found.math_sdp
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")


def test_fp8_on_a_device_without_it_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"generation\.precision: fp8 needs compute capability 8\.9; Some GPU has 8\.6"
    ):
        refuse_precision(Precision.FP8, (8, 6), "Some GPU")
    with pytest.raises(ConfigError, match="fp8 needs a CUDA device, not cpu"):
        check_precision(Precision.FP8, torch.device("cpu"))


@pytest.mark.parametrize(
    ("precision", "capability"),
    [
        (Precision.FP8, (8, 9)),
        (Precision.FP8, (9, 0)),
        (Precision.FP8, (12, 0)),
        (Precision.BF16, (8, 0)),
        (Precision.INT8, (7, 5)),
        (Precision.FP16, (7, 0)),
    ],
)
def test_device_that_multiplies_a_format_is_taken(precision: Precision, capability: tuple[int, int]) -> None:
    refuse_precision(precision, capability, "Some GPU")


def test_bf16_before_ampere_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bf16 needs compute capability 8\.0"):
        refuse_precision(Precision.BF16, (7, 5), "Some GPU")
