"""Names that a person may shorten, as long as it is clear which one is meant."""

from __future__ import annotations

from collections.abc import Collection

from mlxlm.utils.errors import GenerationError


def resolve_abbreviation(name: str, names: Collection[str]) -> str | None:
    """The one of `names` that `name` is, or the only one that begins with it; None if there is none.

    Raises GenerationError, with the candidates, if several begin with it.
    """
    found = [name] if name in names else [candidate for candidate in names if candidate.startswith(name)]
    if len(found) > 1:
        raise GenerationError(f"{name} could be {', '.join(found[:-1])} or {found[-1]}", "more of its letters")
    return found[0] if found else None
