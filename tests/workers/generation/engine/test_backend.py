from __future__ import annotations

import pytest

from schemas.errors import ConfigError
from workers.generation.engine.backend import choose_backend, why_slow
from workers.generation.engine.protocol import Precision
from workers.generation.engine.settings import Backend


def choose(
    wanted: Backend,
    device: str = "cpu",
    lacking: str | None = None,
    kernels_lacking: str | None = None,
    num_ranks: int = 1,
) -> Backend:
    return choose_backend(
        wanted, device_type=device, num_ranks=num_ranks, lacking=lacking, kernels_lacking=kernels_lacking
    )


@pytest.mark.parametrize(
    ("device", "lacking", "kernels_lacking", "expected"),
    [
        ("cpu", None, None, Backend.NATIVE),
        ("cpu", None, "a compiler", Backend.TORCH),
        ("cuda", None, None, Backend.TORCH),
        ("cpu", "model_type 'gpt2'", None, Backend.TRANSFORMERS),
        ("cuda", "model_type 'gpt2'", None, Backend.TRANSFORMERS),
    ],
)
def test_auto_takes_the_fastest_that_can(
    device: str, lacking: str | None, kernels_lacking: str | None, expected: Backend
) -> None:
    assert choose(Backend.AUTO, device, lacking, kernels_lacking) is expected


@pytest.mark.parametrize("wanted", [Backend.NATIVE, Backend.TORCH, Backend.TRANSFORMERS])
def test_a_backend_by_name_is_taken_where_it_can_run(wanted: Backend) -> None:
    assert choose(wanted) is wanted


@pytest.mark.parametrize(
    ("wanted", "device", "lacking", "kernels_lacking", "why"),
    [
        (Backend.NATIVE, "cuda", None, None, "runs on the CPU"),
        (Backend.NATIVE, "cpu", None, "a compiler", "a compiler"),
        (Backend.NATIVE, "cpu", "model_type 'gpt2'", None, "gpt2"),
        (Backend.TORCH, "cuda", "model_type 'gpt2'", None, "gpt2"),
    ],
)
def test_a_backend_by_name_that_cannot_run_is_refused(
    wanted: Backend, device: str, lacking: str | None, kernels_lacking: str | None, why: str
) -> None:
    with pytest.raises(ConfigError, match=rf"generation\.local\.backend: {wanted}.*{why}"):
        choose(wanted, device, lacking, kernels_lacking)


def test_only_torch_splits_a_model() -> None:
    assert choose(Backend.AUTO, num_ranks=2) is choose(Backend.TORCH, num_ranks=2) is Backend.TORCH
    for wanted, lacking in ((Backend.NATIVE, None), (Backend.TRANSFORMERS, None), (Backend.AUTO, "model_type 'gpt2'")):
        with pytest.raises(ConfigError, match=r"generation\.local\.tensor_parallel"):
            choose(wanted, lacking=lacking, num_ranks=2)


@pytest.mark.parametrize(
    ("kernels_lacking", "num_ranks", "why"),
    [("no compiler", 1, "no compiler"), (None, 1, "backend: torch was asked for"), (None, 2, "tensor_parallel")],
)
def test_8_bits_without_kernels_are_called_slow_with_the_reason(
    kernels_lacking: str | None, num_ranks: int, why: str
) -> None:
    def ask(backend: Backend, precision: Precision, device: str = "cpu") -> str | None:
        return why_slow(backend, precision, device_type=device, num_ranks=num_ranks, kernels_lacking=kernels_lacking)

    assert why in (ask(Backend.TORCH, Precision.INT8) or "")
    assert ask(Backend.TORCH, Precision.FP32) is None
    assert ask(Backend.TORCH, Precision.INT8, "cuda") is None
    assert ask(Backend.NATIVE, Precision.INT8) is None
