"""llama.cpp as a process of the comparison. Runs in the peers' own environment: needs llama-cpp-python alone.

Drives the low-level batch interface: all sequences are decoded in one `llama_decode` per step, so that concurrency is
real. Prompts go in together, in batches of `N_BATCH` tokens, as its own server does it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from ops.bench.engine.entrant import Arrivals, Turn, serve

N_BATCH = 2_048  # llama.cpp's own default
N_UBATCH = 512  # likewise


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]  # the peers' Python alone has it
def _quiet(level: int, text: bytes, user: object) -> None:
    """Drop what llama.cpp tells about its loading."""


class Llama:
    """A GGUF file with a cache for `num_sequences` sequences of `context` tokens each."""

    def __init__(self, command: dict[str, Any]) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._file = Path(command["gguf"])
        self._num_sequences: int = command["num_sequences"]
        model = llama_cpp.llama_model_load_from_file(str(self._file).encode(), llama_cpp.llama_model_default_params())
        assert model is not None, f"llama.cpp cannot read {self._file}"
        self._context = llama_cpp.llama_init_from_model(model, self._parameters(command))
        assert self._context is not None, "llama.cpp has no memory for its context"
        self._weight_bytes = int(llama_cpp.llama_model_size(model))
        self._vocab_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        self._batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)
        self._context_tokens = int(llama_cpp.llama_n_ctx(self._context))
        heads = llama_cpp.llama_model_n_head_kv(model)
        head_dim = llama_cpp.llama_model_n_embd(model) // llama_cpp.llama_model_n_head(model)
        self._kv_token_bytes = 2 * 2 * int(heads * head_dim * llama_cpp.llama_model_n_layer(model))  # fp16

    def _parameters(self, command: dict[str, Any]) -> Any:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = self._num_sequences * command["context"]
        parameters.n_batch = N_BATCH
        parameters.n_ubatch = N_UBATCH
        parameters.n_seq_max = self._num_sequences
        parameters.n_threads = parameters.n_threads_batch = command["threads"]
        parameters.no_perf = True
        return parameters

    def facts(self) -> dict[str, Any]:
        """Return versions, sizes and settings."""
        return {
            "weight_bytes": self._weight_bytes,
            "kv_bytes": self._context_tokens * self._kv_token_bytes,
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "how": f"one llama_decode of all sequences a step, n_batch {N_BATCH}, n_ubatch {N_UBATCH}, fp16 cache; "
            "no end of sequence is looked for",
        }

    def run(self, prompts: list[list[int]], max_tokens: int, turn: Turn) -> Arrivals:
        """Read all prompts, then decode all sequences together."""
        assert len(prompts) <= self._num_sequences
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        turn.begin()
        arrivals: Arrivals = [[] for _ in prompts]
        self._read(prompts, arrivals)
        for step in range(max_tokens - 1):
            if turn.is_over(step + 1):
                break
            rows = [
                (each[-1][1][0], len(prompt) + step, sequence)
                for sequence, (each, prompt) in enumerate(zip(arrivals, prompts, strict=True))
            ]
            self._step(rows, {row: row for row in range(len(rows))}, arrivals)
        return arrivals

    def _read(self, prompts: list[list[int]], arrivals: Arrivals) -> None:
        rows = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        for start in range(0, len(rows), N_BATCH):
            part = rows[start : start + N_BATCH]
            ends = {row: sequence for row, (_, _, sequence, is_last) in enumerate(part) if is_last}
            self._step([row[:3] for row in part], ends, arrivals)

    def _step(self, rows: Sequence[tuple[int, int, int]], ends: dict[int, int], arrivals: Arrivals) -> None:
        """Decode rows of (token, position, sequence); those in `ends` give the next token of their sequence."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token_id, position, sequence) in enumerate(rows):
            batch.token[row] = token_id
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = row in ends
        code = llama_cpp.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode returned {code}"
        drawn = {sequence: self._greedy(row) for row, sequence in ends.items()}
        now = time.perf_counter()
        for sequence, token_id in drawn.items():
            arrivals[sequence].append((now, [token_id]))

    def _greedy(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve(Llama)
