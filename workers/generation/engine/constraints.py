"""The form of an answer as what may come next: JSON schemas, regular expressions, choices to masks of allowed tokens.

llguidance does the parsing: it bounds what a form may cost, refuses by name what it cannot hold an answer to, needs no
other package, and compiled a small schema in 1.5 ms (xgrammar 0.2.9: 41 ms, but its masks took a third of the time).

Knows bytes of tokens, no model. The invariants: only tokens with text and, where the form is whole, the ends of
sequence are ever allowed; JSON gets `, ` and `: ` and no other white space outside of strings, so that none is endless.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, NoReturn

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from schemas.errors import InvalidRequestError
from workers.generation.engine.protocol import ConstraintKind, ConstraintSpec, Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 64  # a deployment's forms are few and recur
MAX_BYTES = 65_536
MAX_ERROR_CHARS = 300
NOT_ALLOWED = "satisfy the grammar"  # llguidance's word for a token that does not fit, as opposed to too much work
JSON_OPTIONS: JsonCompileOptions = {
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,  # as anyOf: what fits several of them cannot be told while it is written
    "lenient": False,
}
# Fuel is the library's measure of work, 14,000 to 50,000 a millisecond; a state takes 1 to 2 kB.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class Constraint:
    """A form, as far as the tokens of one answer have come."""

    __slots__ = ("_matcher", "_num_words")

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    @property
    def is_finished(self) -> bool:
        """Say whether nothing but the end of sequence may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> torch.Tensor:
        """Return the allowed tokens `(ceil(vocab / 32),)` int32, bit i of word w is token 32 w + i.

        Raises InvalidRequestError where the form has become too much work.
        """
        mask = torch.zeros(self._num_words, dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if self._matcher.is_error():  # its mask would allow an end here
            _refuse(self._matcher.get_error())
        return mask

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if it is not allowed here. Raises InvalidRequestError as `mask`."""
        if self._matcher.consume_token(token_id):
            return True
        error = self._matcher.get_error()
        if NOT_ALLOWED not in error:
            _refuse(error)
        return False

    def fork(self) -> Constraint:
        """Return one that goes on from here apart."""
        return Constraint(self._matcher.deep_copy(), self._num_words)


class ConstraintCompiler:
    """Compiles for one tokenizer and one model, whose vocabulary may be the larger. Safe from any thread."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._vocabulary: LLTokenizer | None = None  # made for the first form: it takes a fifth of a second
        self._compiled: OrderedDict[ConstraintSpec, Constraint] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, spec: ConstraintSpec) -> Constraint:
        """Return a constraint at its beginning. Takes milliseconds the first time.

        Raises InvalidRequestError for `response_format` with what is wrong about the form.
        """
        with self._lock:
            found = self._compiled.get(spec)
            if found is None:
                found = self._compiled[spec] = self._compile(spec)
                if len(self._compiled) > MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(spec)
            return found.fork()

    def _compile(self, spec: ConstraintSpec) -> Constraint:
        if len(spec.value.encode()) > MAX_BYTES:
            raise InvalidRequestError(
                f"response_format: {spec.kind}: at most {MAX_BYTES} bytes are allowed", field="response_format"
            )
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size)
        try:
            matcher = LLMatcher(self._vocabulary, _grammar(spec), log_level=0, limits=LIMITS)
        except ValueError as error:
            _refuse(f"{spec.kind}: {error}")
        if matcher.is_error():
            _refuse(f"{spec.kind}: {matcher.get_error()}")
        made = Constraint(matcher, (self._vocab_size + 31) // 32)
        made.fork().mask()  # what no text can satisfy shows here
        return made


class _Tokens:
    """A tokenizer as llguidance asks for it: what has no text is allowed nowhere."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos: list[int]) -> None:
        self.eos_token_id = eos[0]
        self.special_token_ids = eos
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return list(self._tokenizer.encode(text.decode("utf-8", "replace")))


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    eos = sorted(token_id for token_id in tokenizer.eos_token_ids if 0 <= token_id < vocab_size)
    if not eos:
        _refuse("this model has no end of sequence")
    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, vocab_size, eos)), n_vocab=vocab_size, eos_token=eos)


def _grammar(spec: ConstraintSpec) -> str:
    """Return the form in llguidance's own words. Raises ValueError for a value that is none."""
    match spec.kind:
        case ConstraintKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_OPTIONS)
        case ConstraintKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(spec.value, overrides=JSON_OPTIONS)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.value)
        case ConstraintKind.CHOICE:
            choices = json.loads(spec.value)
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))


def _refuse(reason: str) -> NoReturn:
    short = " ".join(reason.removesuffix("<non-verbose/>").split())[:MAX_ERROR_CHARS]
    if "NoExtension" in short:
        short = "no text has this form"
    raise InvalidRequestError(f"response_format: {short}", field="response_format")
