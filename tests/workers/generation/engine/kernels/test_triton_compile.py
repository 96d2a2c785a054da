"""The kernels compile for devices that are not here: Triton brings its own assembler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton comes with torch's CUDA builds")
pytestmark = pytest.mark.slow

AMPERE, HOPPER = 80, 90
SHARED_BYTES = 99 * 1024  # what one program may use on every device from Ampere on
POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int8: "*i8"}


@pytest.mark.parametrize("capability", [AMPERE, HOPPER])
@pytest.mark.parametrize(
    ("query", "cache"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.int8),
        (torch.bfloat16, torch.float32),
    ],
)
def test_walk_compiles_within_shared_memory(query: torch.dtype, cache: torch.dtype, capability: int) -> None:
    from workers.generation.engine.kernels import paged_attention

    is_8_bit = cache is torch.int8
    scales = "*fp32" if is_8_bit else POINTERS[cache]
    types = {"query": POINTERS[query], "keys": POINTERS[cache], "values": POINTERS[cache], "tables": "*i32"}
    types |= {"key_scales": scales, "value_scales": scales, "lengths": "*i32", "parts": "*fp32", "peaks": "*fp32"}
    types |= {"sums": "*fp32", "scale": "fp32", "window": "i32"}
    types |= {"table_stride": "i32", "num_splits": "i32"}
    constants = {"num_kv_heads": 8, "GROUP": 4, "ROWS": 16, "HEAD_DIM": 128, "DIM": 128, "BLOCK_SIZE": 16}
    constants |= {"TILE": paged_attention.tile_size(16 * 128), "SPLIT": 256, "IS_8_BIT": is_8_bit}
    constants |= {"DTYPE": paged_attention._dot_dtype(query, cache)}
    compiled = _compile(paged_attention._walk_split, types, constants, capability)
    assert compiled.metadata.shared <= SHARED_BYTES
    assert "mma" in compiled.asm["ptx"]  # on tensor cores


def test_sum_over_splits_compiles() -> None:
    from workers.generation.engine.kernels import paged_attention

    types = {"parts": "*fp32", "peaks": "*fp32", "sums": "*fp32", "lengths": "*i32", "mixed": "*bf16"}
    types |= {"window": "i32", "num_splits": "i32"}
    constants = {"num_heads": 32, "HEAD_DIM": 80, "DIM": 128, "SPLIT": 256}
    assert _compile(paged_attention._add_splits, types, constants, AMPERE).asm["cubin"]


def _compile(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return triton.compile(
        ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", capability, 32), options=options
    )
