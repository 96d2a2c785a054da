"""Makes a tokenizer out of the metadata of a GGUF file.

Knows the keys of llama.cpp and the pre-tokenizers that it names, no model. GGUF carries the name of the rule that
splits a text into words, not the rule; one that is not known here is refused by name, because another rule gives other
tokens. A `tokenizer.json` beside the file helps then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from schemas.errors import ConfigError
from workers.generation.engine.tokenizer import BytePairTokenizer
from workers.generation.engine.tokenizer_form import SPACE

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {  # as the models' own tokenizer.json have them; the empty one is GPT-2's, within ByteLevel
    "gpt-2": "",
    "smollm": "",
    "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _REST,
    "llama3": _LETTERS + r"\p{N}{1,3}" + _REST,
    "llama-v3": _LETTERS + r"\p{N}{1,3}" + _REST,
    "qwen2": _LETTERS + r"\p{N}" + _REST,
    "tekken": _TEKKEN,
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word that is a token is not merged from its parts
COMPOSED = ("qwen2",)  # text is brought to Unicode's form C first


def gguf_tokenizer(metadata: Mapping[str, Any]) -> BytePairTokenizer:
    """Return the tokenizer of a GGUF file. Raises ConfigError by key and value for one that is not known here."""
    try:
        model = metadata["tokenizer.ggml.model"]
        builders = {"gpt2": _byte_level, "llama": _sentence_piece}
        if model not in builders:
            raise ConfigError(f"tokenizer.ggml.model {model!r} is not supported, only {', '.join(builders)}")
        native = builders[model](metadata)
        _add_tokens(native, metadata)
        return BytePairTokenizer(native.to_str().encode(), eos_token_ids=end_ids(metadata))
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise ConfigError(f"its tokenizer is broken: {error!r}") from error


def end_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that end an answer."""
    ends = (metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS)
    return frozenset(end for end in ends if isinstance(end, int))


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise ConfigError(f"tokenizer.ggml.pre {pre!r} is not known here, only {known}: put tokenizer.json beside it")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    native = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=pre in WHOLE_WORDS))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not PATTERNS[pre])
    before: list[pre_tokenizers.PreTokenizer] = []
    if PATTERNS[pre]:
        before = [pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated")]
    if pre == "smollm":
        before = [pre_tokenizers.Digits(individual_digits=True)]
    native.pre_tokenizer = pre_tokenizers.Sequence([*before, byte_level])
    if pre in COMPOSED:
        native.normalizer = normalizers.NFC()
    native.decoder = decoders.ByteLevel()
    return native


def _sentence_piece(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuild SentencePiece's BPE: it merges the pair that gives the token of the highest score."""
    vocabulary = _vocabulary(metadata)
    merges = _merges(vocabulary, metadata["tokenizer.ggml.scores"])
    unknown = metadata["tokenizer.ggml.tokens"][metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    native = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces, begin = normalizers.Replace(" ", SPACE), normalizers.Prepend(SPACE)
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    native.normalizer = normalizers.Sequence([begin, spaces] if has_prefix else [spaces])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    native.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return native


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens with their ids. Control tokens at the end are left to be added: text never becomes them."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    last = len(tokens)
    while last and kinds[last - 1] in (CONTROL, USER_DEFINED):
        last -= 1
    return {token: token_id for token_id, token in enumerate(tokens[:last])}


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    found = []
    for token, token_id in vocabulary.items():
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[token_id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _add_tokens(native: Tokenizer, metadata: Mapping[str, Any]) -> None:
    """Add control and user-defined tokens in their order, so that those behind the vocabulary get their ids."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    native.add_tokens(added)
    for token_id, token in enumerate(tokens):
        if native.token_to_id(token) != token_id:
            raise ConfigError(f"the token {token!r} has no id of its own")
