"""What to train on: sources, weights, the validation split and filters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from mlxlm.config.option import option, range_problems
from mlxlm.data.manifest import WEIGHTS_HINT, normalize_weights
from mlxlm.utils.errors import DataError

PACKINGS = ("concatenate", "best-fit")
BAD_INPUT_POLICIES = ("stop", "skip")
_data = partial(option, section="Data")


@dataclass(frozen=True)
class DataOptions:
    """Text to train on and how it is read, filtered and split.

    Attributes:
        sources: Paths to text, see `read_documents`; or, where training starts, one folder made by `prepare`.
        weights: Share of the training tokens to draw from each source, in any unit: they are divided by their sum.
            None draws from all text equally.
        validation: Paths whose text is held out for validation, instead of a share of the sources.
        validation_fraction: Share of the documents to hold out; 0 holds out none. See `ValidationSplit`.
        text_column: Column (in JSON lines, key) that holds the text or the messages. None: "text" or "messages".
        dedup: Leave out documents whose Jaccard similarity to an earlier one is at least this, above 0 and at most 1;
            1 removes exact duplicates only. None keeps all. See `DuplicateFilter`.
        on_bad_input: "stop" or "skip", see `BadInput`.
        fraction: Share of the text to read, see `read_documents`.
        stdin: The stream that the source "-" stands for.

    Raises:
        DataError: An option has a value that can't work.
    """

    sources: Sequence[str | Path]
    weights: Sequence[float] | None = None
    validation: Sequence[str | Path] = _data((), "Text for validation, instead of a part of DATA.", metavar="FILE")
    validation_fraction: float = _data(
        0.05,
        "Fraction of DATA that is held out for validation.",
        low=1e-9,
        below=1,
        also=0,
        valid="0, or from 1e-9 to below 1, such as 0.05",
    )
    text_column: str | None = _data(
        None,
        "Column of tables, or field of JSON lines, that has the text.",
        metavar="NAME",
        default_text="text, or messages",
    )
    dedup: float | None = _data(
        None,
        "Drop near-duplicates: documents whose 5-word shingles have at least this Jaccard similarity with an earlier "
        "document, such as 0.8 (estimated to about 0.04, ignoring case and punctuation); 1 drops exact duplicates "
        "only. Takes about 1 kB of memory per document.",
        above=0,
        high=1,
        metavar="SIMILARITY",
    )
    on_bad_input: str = _data(
        "stop",
        "At a line that is not UTF-8 text or valid JSON: stop, or skip and count it.",
        choices=BAD_INPUT_POLICIES,
    )
    fraction: float = 1.0
    stdin: IO[bytes] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if problems := list(range_problems(self)):
            raise DataError("invalid data options: " + "; ".join(problems))
        if self.weights is None:
            return
        if len(self.weights) != len(self.sources):
            raise DataError(f"{len(self.sources)} sources have {len(self.weights)} weights", "one weight per source")
        object.__setattr__(self, "weights", normalize_weights(self.weights))

    def source_names(self) -> list[str]:
        """Unique names of the sources: file names without their folder, since a dataset may be published."""
        names: list[str] = []
        for path in self.sources:
            name = source_name(path)
            numbered = (f"{name} ({number})" for number in itertools.count(2))
            names.append(name if name not in names else next(other for other in numbered if other not in names))
        return names


def source_name(path: str | Path) -> str:
    """The file name of a source, or "stdin"."""
    return "stdin" if str(path) == "-" else Path(path).name or str(path)


def parse_weighted_sources(sources: Sequence[str | Path]) -> tuple[list[str | Path], list[float] | None]:
    """Split sources written as PATH=WEIGHT. A path that exists as written has no weight.

    Returns:
        The paths, and the weights divided by their sum; None if no source has a weight.

    Raises:
        DataError: Only some sources have weights, or a weight is not positive.
    """
    pairs = [_split_weight(source) for source in sources]
    paths, weights = [path for path, _ in pairs], [weight for _, weight in pairs if weight is not None]
    if not weights:
        return paths, None
    if len(weights) < len(paths):
        unweighted = next(path for path, weight in pairs if weight is None)
        raise DataError(f"{unweighted} has no weight, but other sources do", WEIGHTS_HINT)
    return paths, normalize_weights(weights)


def _split_weight(source: str | Path) -> tuple[str | Path, float | None]:
    path, equals, weight = str(source).rpartition("=")
    if not equals or not path or Path(source).exists():
        return source, None
    try:
        return path, float(weight)
    except ValueError:
        return source, None
