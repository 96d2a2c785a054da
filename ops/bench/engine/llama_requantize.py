"""Writes a GGUF file in 8 bits from one in 4, with llama.cpp's own tool, so that it also runs at our width.

Runs in the peers' own environment: needs llama-cpp-python alone.
"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # the peers' Python alone has it
def _quiet(level: int, text: bytes, user: object) -> None:
    """Drop what llama.cpp tells about each tensor."""


def requantize(source: str, target: str, threads: int) -> None:
    """Write `target`: Q8_0 for each matrix of `source`. Raises RuntimeError."""
    llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.nthread = threads
    parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
    parameters.allow_requantize = True
    code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")


if __name__ == "__main__":
    requantize(sys.argv[1], sys.argv[2], int(sys.argv[3]))
