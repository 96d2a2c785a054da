"""Which backend runs a model on a device, and the refusal of one that cannot.

Knows names and what was found out about model and machine, no weights. The invariant: whoever asks for a backend by
name gets it or an error, never another one, since two backends do not draw the same tokens.
"""

from __future__ import annotations

from schemas.errors import ConfigError
from workers.generation.engine.protocol import Precision
from workers.generation.engine.settings import Backend

KEY = "generation.local.backend"
CURE = "take generation.precision fp32, or let the kernels run: a C++ compiler, backend auto, tensor_parallel 1"


def choose_backend(
    wanted: Backend,
    *,
    device_type: str,
    num_ranks: int,
    lacking: str | None,
    kernels_lacking: str | None,
) -> Backend:
    """Return the backend for a model: the wanted one, or the fastest.

    `num_ranks` processes share the model, which only torch can. `lacking` is what the engine's own models do not have
    for this one, `kernels_lacking` what the C++ kernels do not; None where nothing. Raises ConfigError where the wanted
    one cannot run here.
    """
    if num_ranks > 1 and (wanted in (Backend.NATIVE, Backend.TRANSFORMERS) or lacking is not None):
        raise ConfigError(f"generation.local.tensor_parallel: only torch splits a model: {lacking or wanted}")
    if wanted is Backend.AUTO:
        if lacking is not None:
            return Backend.TRANSFORMERS
        is_native = device_type == "cpu" and kernels_lacking is None and num_ranks == 1
        return Backend.NATIVE if is_native else Backend.TORCH
    if wanted is not Backend.TRANSFORMERS and lacking is not None:
        raise ConfigError(f"{KEY}: {wanted} cannot run this model: {lacking}")
    if wanted is Backend.NATIVE and device_type != "cpu":
        raise ConfigError(f"{KEY}: native runs on the CPU, not on {device_type}")
    if wanted is Backend.NATIVE and kernels_lacking is not None:
        raise ConfigError(f"{KEY}: native cannot run here: {kernels_lacking}")
    return wanted


def why_slow(
    backend: Backend, precision: Precision, *, device_type: str, num_ranks: int, kernels_lacking: str | None
) -> str | None:
    """Return why what was chosen is many times slower than fp32 would be, None where it is not."""
    if backend is not Backend.TORCH or precision is not Precision.INT8 or device_type != "cpu":
        return None
    if num_ranks > 1:
        return "generation.local.tensor_parallel: only torch splits a model"
    return kernels_lacking or f"{KEY}: torch was asked for"
