"""The switches of a CUDA device, and what is reported of them.

Knows torch's global flags, no model. They belong to the process: set them once, before the first weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from schemas.errors import ConfigError
from workers.generation.engine.protocol import Precision
from workers.generation.engine.settings import LocalEngineSettings

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0. Earlier tensor cores have no 8-bit floats
BF16_CAPABILITY = (8, 0)  # Ampere


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFlags:
    """What torch says of itself: TF32 in matrix products, and the implementations of attention that it may choose."""

    tf32: bool
    flash_sdp: bool
    mem_efficient_sdp: bool
    math_sdp: bool
    is_flash_built: bool


def set_flags(settings: LocalEngineSettings) -> AttentionFlags:
    """Set the process's flags as configured, and return what torch has made of them.

    Plain attention stays allowed: it runs what the others refuse, fp32 with a mask for instance.
    """
    torch.backends.cuda.matmul.allow_tf32 = settings.tf32
    torch.backends.cudnn.allow_tf32 = settings.tf32
    torch.backends.cuda.enable_flash_sdp(settings.enable_flash_sdp)
    torch.backends.cuda.enable_mem_efficient_sdp(settings.enable_mem_efficient_sdp)
    torch.backends.cuda.enable_math_sdp(True)
    return flags()


def flags() -> AttentionFlags:
    """Return the flags as they stand."""
    return AttentionFlags(
        tf32=torch.backends.cuda.matmul.allow_tf32,
        flash_sdp=torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch leaves it untyped
        mem_efficient_sdp=torch.backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch leaves it untyped
        math_sdp=torch.backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch leaves it untyped
        is_flash_built=torch.backends.cuda.is_flash_attention_available(),
    )


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise ConfigError where a device does not multiply in a number format."""
    if device.type == "cuda":
        refuse_precision(precision, torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))
    elif precision is Precision.FP8:
        raise ConfigError(f"generation.precision: fp8 needs a CUDA device, not {device.type}")


def refuse_precision(precision: Precision, capability: tuple[int, int], name: str) -> None:
    """Raise ConfigError where a CUDA device of a compute capability does not multiply in a number format."""
    needed = {Precision.FP8: FP8_CAPABILITY, Precision.BF16: BF16_CAPABILITY}.get(precision, (0, 0))
    if capability < needed:
        wanted, found = ".".join(map(str, needed)), ".".join(map(str, capability))
        raise ConfigError(f"generation.precision: {precision} needs compute capability {wanted}; {name} has {found}")
