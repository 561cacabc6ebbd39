"""Sources with weights: PATH=WEIGHT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxlm.data.manifest import normalize_weights
from mlxlm.utils.errors import DataError

_HINT = "wiki.txt=0.7 books=0.3: all sources with a weight, or none"


def parse_weighted_sources(sources: Sequence[str | Path]) -> tuple[list[str | Path], list[float] | None]:
    """The paths in `sources`, and the weights of those written as PATH=WEIGHT, divided by their sum; None without any.

    What exists as it is written is a path. Raises DataError if only some sources have weights, and for weights that
    are not positive.
    """
    split = [_split(source) for source in sources]
    paths, weights = [path for path, _ in split], [weight for _, weight in split if weight is not None]
    if not weights:
        return paths, None
    if len(weights) < len(paths):
        without = next(path for path, weight in split if weight is None)
        raise DataError(f"{without} has no weight, and other sources have one", _HINT)
    try:
        return paths, normalize_weights(weights)
    except ValueError as error:
        raise DataError(str(error), _HINT) from None


def _split(source: str | Path) -> tuple[str | Path, float | None]:
    path, equals, weight = str(source).rpartition("=")
    if not equals or not path or Path(source).exists():
        return source, None
    try:
        return path, float(weight)
    except ValueError:
        return source, None
