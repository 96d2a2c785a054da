"""Text to terms of the keyword channel, alike for passages and questions. Pure but for the dictionary it loads once.

Latin words are folded and stemmed; product codes and numbers stay whole and are also split, so that "AF-2041",
"af2041" and "2041" all find "AF-2041"; Chinese is cut by jieba's dictionary and, because a dictionary may cut a
question and a passage differently, into overlapping pairs of characters too (which also covers Japanese and Korean).
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
import warnings
from collections.abc import Iterator
from typing import Any

import Stemmer

MAX_TERM_CHARS = 64
PAIR_MARK = "_"  # keeps pairs of characters and words apart: each has its own weight

CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_LATIN = rf"(?:(?![{CJK}])[^\W_])+"  # letters and digits of all scripts that put spaces between words
_RUN = re.compile(
    rf"(?P<cjk>[{CJK}]+)"
    rf"|(?P<code>{_LATIN}(?:[-_./:]{_LATIN})+)"  # AF-2041, 30-day, 400-820-0142, 4.50, 9:30
    rf"|(?P<word>{_LATIN}(?:['’]{_LATIN})?)"
)
_CJK_CHARS = re.compile(rf"[{CJK}]")
_LETTERS_OR_DIGITS = re.compile(r"[^\W\d_]+|\d+")
_DECIMAL = re.compile(r"\d+(?:[.:]\d+)+")

_ENGLISH_STOP_WORDS = """
    a about after all also am an and any are as at be because been before being but by can cannot could did do does
    doing done for from get gets getting go got had has have having he her here him his how i if in into is it its just
    let like make may me might more most much must my no not of off on one only or other our ours out please shall she
    should so some such than that the their them then there these they this those to too up us very want was we were
    what when where which while who whom whose why will with would yes you your yours
"""
_CHINESE_STOP_WORDS = """
    的 了 吗 呢 吧 啊 呀 嘛 么 我 你 您 他 她 它 我们 你们 他们 是 在 有 和 与 或 及 也 都 就 还 把 被 给 对 从 到 为
    这 那 这个 那个 哪 哪个 哪些 什么 怎么 怎样 如何 为什么 多少 几 请 请问 可以 能 能不能 可不可以 要 会 一个 一下
    很 又 而 不 没 没有 如果 的话 后 里 上 下 个 多 多久 多大 多长 时候 什么时候 应该 才 几天
"""
ENGLISH_STOP_WORDS = frozenset(_ENGLISH_STOP_WORDS.split())
CHINESE_STOP_WORDS = frozenset(_CHINESE_STOP_WORDS.split())


def is_mostly_cjk(text: str) -> bool:
    """Return whether a text is rather Chinese, Japanese or Korean: one such character weighs as two Latin letters."""
    num_cjk = len(_CJK_CHARS.findall(text))
    num_latin = sum(character.isalpha() for character in text) - num_cjk
    return num_cjk > 0 and 2 * num_cjk >= num_latin


def terms(text: str) -> list[str]:
    """Return the terms of a text in order, with repeats; stop words and marks are left out."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return [term[:MAX_TERM_CHARS] for run in _RUN.finditer(folded) for term in _run_terms(run)]


def warm() -> None:
    """Load the Chinese dictionary, about a second, so that the first Chinese text need not wait for it."""
    _dictionary()


def _run_terms(run: re.Match[str]) -> Iterator[str]:
    if run["cjk"]:
        yield from _cjk_terms(run["cjk"])
    elif run["code"]:
        yield from _code_terms(run["code"])
    else:
        yield from _word_terms(run["word"])


def _code_terms(code: str) -> Iterator[str]:
    yield code
    if _DECIMAL.fullmatch(code):  # the halves of 4.50 or 9:30 mean nothing
        return
    parts = re.split(r"[-_./:]", code)
    if any(character.isdigit() for character in code):
        yield "".join(parts)
    for part in parts:
        yield from _word_terms(part)


def _word_terms(word: str) -> Iterator[str]:
    pieces = _LETTERS_OR_DIGITS.findall(word)
    if len(pieces) > 1 and "'" not in word and "’" not in word:  # af2041, 30day, 750ml
        yield word
        for piece in pieces:
            yield from _word_terms(piece)
        return
    word = re.split("['’]", word)[0]
    if word not in ENGLISH_STOP_WORDS and (len(word) > 1 or word.isdigit()):
        yield _stemmer().stemWord(_without_accents(word))


def _cjk_terms(text: str) -> Iterator[str]:
    stretch = ""  # of words that are no stop words: pairs do not reach over "什么" or "的"
    for word in _dictionary().cut(text):
        if word in CHINESE_STOP_WORDS:
            yield from _pairs(stretch)
            stretch = ""
            continue
        yield from _dictionary().cut_for_search(word)
        stretch += word
    yield from _pairs(stretch)


def _pairs(text: str) -> Iterator[str]:
    for start in range(len(text) - 1):
        yield text[start : start + 2] + PAIR_MARK


def _without_accents(word: str) -> str:
    if word.isascii():
        return word
    return "".join(c for c in unicodedata.normalize("NFKD", word) if not unicodedata.combining(c))


@functools.cache
def _stemmer() -> Any:
    return Stemmer.Stemmer("english")


@functools.cache
def _dictionary() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its sources have invalid escapes, and it asks for pkg_resources
        import jieba
    jieba.setLogLevel(logging.WARNING)
    # `initialize` would read its words from a cache in a folder that everybody may write to.
    tokenizer = jieba.Tokenizer()
    tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(tokenizer.get_dict_file())
    tokenizer.initialized = True
    return tokenizer
