"""What every part of the configuration has in common: unknown keys are refused, and passwords stand in no repr."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=604_800)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

SECRETS = frozenset({"sasl_password", "url", "state_url"})


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the configuration. Passwords, and URLs, which may hold them, are in no repr."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return [(name, "…" if value and name in SECRETS else value) for name, value in values]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"
