"""The exception tree as its docstring draws it."""

from __future__ import annotations

import re

from schemas import errors
from schemas.errors import GeaError


def tree(root: type[GeaError]) -> dict[str, str]:
    """Map each error below `root` to its parent."""
    found = {}
    for child in root.__subclasses__():
        if child.__module__ == "schemas.errors":
            found[child.__name__] = root.__name__
            found.update(tree(child))
    return found


def drawn() -> dict[str, str]:
    """Read the tree out of the module's docstring: each level is indented by four more."""
    parents = {0: "GeaError"}
    found = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│ ]*)[├└]── (\w+)", line)
        if match:
            depth = len(match[1]) // 4 + 1
            found[match[2]] = parents[depth - 1]
            parents[depth] = match[2]
    return found


def test_the_docstring_draws_the_tree() -> None:
    assert drawn() == tree(GeaError)


def test_codes_are_unique_and_stable_words() -> None:
    classes = [GeaError, *(getattr(errors, name) for name in tree(GeaError))]
    codes = [error.code for error in classes if error is not GeaError]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z_]+", code) for code in codes)
