"""Kernels of our own, for what torch is slow at: C++ for the CPU, with how it is compiled, loaded and called.

Knows tensors by their address, no models' files and no requests. The invariant: a row's result depends on nothing but
the row: not on its neighbours, the number of threads, or how work was cut.
"""

from workers.generation.engine.kernels.build import BuildError, build_library
from workers.generation.engine.kernels.library import Library, load_library

__all__ = ["BuildError", "Library", "build_library", "load_library"]
