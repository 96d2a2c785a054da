"""transformers as a process of the comparison, in both of its ways: continuous batching, and static `generate`.

Continuous batching is what `generate_batch` does: its own manager, told beforehand how much will come, here with each
token streamed to the reader. Static `generate` pads all prompts to one length and ends when all are done; its tokens
are noted by a stopping criterion, which sees each step. The model folder names no end of sequence, so neither stops
early.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from ops.bench.engine.entrant import Arrivals, Turn, serve

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PAGE_SIZE = 256  # its own default
POLL_S = 1.0
END_POLL_S = 0.05
PAD = 0  # masked out


def load_model(command: dict[str, Any]) -> Any:
    """Load the model folder in the precision of the command."""
    torch.set_num_threads(command["threads"])
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(command["folder"], dtype=DTYPES[command["precision"]])
    return model.eval()


def weight_bytes(model: Any) -> int:
    """Return the bytes of the parameters; tied ones count once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def kv_bytes(model: Any, num_tokens: int) -> int:
    """Return the bytes of the keys and values of as many tokens."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(num_tokens * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize)


class StaticGenerate:
    """`model.generate` on all prompts at once, padded on the left."""

    def __init__(self, command: dict[str, Any]) -> None:
        self._model = load_model(command)
        self._kv_tokens = 0

    def facts(self) -> dict[str, Any]:
        """Return versions, sizes and settings."""
        return {
            "weight_bytes": weight_bytes(self._model),
            "kv_bytes": kv_bytes(self._model, self._kv_tokens),
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "how": f"generate(do_sample=False), {self._model.config._attn_implementation} attention; the model folder "
            "names no end of sequence",
        }

    def run(self, prompts: list[list[int]], max_tokens: int, turn: Turn) -> Arrivals:
        """Generate; each step's tokens arrive when the step is over."""
        longest = max(map(len, prompts))
        padded = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        times: list[float] = []

        def note(token_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.full((token_ids.shape[0],), turn.is_over(len(times)))

        turn.begin()
        drawn = self._model.generate(
            padded,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=PAD,
            stopping_criteria=[note],
        )
        self._kv_tokens = max(self._kv_tokens, padded.numel() + len(prompts) * (max_tokens - 1))
        rows = drawn[:, longest:].tolist()
        return [[(at, [token_id]) for at, token_id in zip(times, row, strict=True)] for row in rows]


class GenerateBatch:
    """The manager of continuous batching, started once and fed with requests that stream."""

    def __init__(self, command: dict[str, Any]) -> None:
        self._model = load_model(command)
        num_sequences, context = command["num_sequences"], command["context"]
        self._num_blocks = num_sequences * (math.ceil(context / PAGE_SIZE) + 1)
        hints = WorkloadHints(
            max_prompt_length=context - command["max_tokens"],
            max_generated_length=command["max_tokens"],
            num_requests=num_sequences,
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=self._num_blocks),
            workload_hints=hints,
        )
        self._manager.warmup()
        self._manager.start()

    def facts(self) -> dict[str, Any]:
        """Return versions, sizes and settings."""
        return {
            "weight_bytes": weight_bytes(self._model),
            "kv_bytes": kv_bytes(self._model, self._num_blocks * PAGE_SIZE),
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "how": f"ContinuousBatchingManager with workload hints, streaming, {self._num_blocks} blocks of {PAGE_SIZE}"
            " (its default of 60 % of the memory is no faster), "
            f"{self._model.config._attn_implementation} attention; "
            "eos_token_id=-1",
        }

    def run(self, prompts: list[list[int]], max_tokens: int, turn: Turn) -> Arrivals:
        """Hand all requests over and read what streams back."""
        turn.begin()
        ids = [self._manager.add_request(prompt, max_new_tokens=max_tokens, streaming=True) for prompt in prompts]
        places = {request_id: place for place, request_id in enumerate(ids)}
        arrivals: Arrivals = [[] for _ in prompts]
        seen = [0] * len(prompts)
        num_open = len(prompts)
        while num_open and not turn.is_over(min(seen)):
            output = self._manager.get_result(timeout=POLL_S)
            if output is None:
                assert self._manager.is_running(), "continuous batching has stopped"
                continue
            assert output.error is None, output.error
            place = places.get(output.request_id)
            if place is None:  # of an earlier run that was broken off
                continue
            if fresh := output.generated_tokens[seen[place] :]:
                arrivals[place].append((time.perf_counter(), list(fresh)))
                seen[place] += len(fresh)
            num_open -= output.is_finished()
        self._end(ids)
        return arrivals

    def _end(self, ids: list[str | None]) -> None:
        """Give up what still runs, so that the next run has the machine for itself."""
        for request_id in ids:
            self._manager.cancel_request(request_id)
        while self._manager.batch_processor.has_pending_requests():
            time.sleep(END_POLL_S)


if __name__ == "__main__":
    serve(GenerateBatch if sys.argv[1:] == ["batch"] else StaticGenerate)
