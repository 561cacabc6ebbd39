"""The tokenizer and the token shards of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxlm.checkpoint import open_tokenizer
from mlxlm.data import DataOptions, Manifest, prepare, total_bytes, training_texts
from mlxlm.data.manifest import is_prepared
from mlxlm.data.sources import unseekable_source
from mlxlm.tokenizer import Tokenizer, load, train
from mlxlm.train.events import TextLimited
from mlxlm.train.settings import TokenizerOptions
from mlxlm.utils.errors import DataError

PREPARATION_FRACTION = 0.15  # of the time of a run, at most, for its tokenizer and its tokens
_SAMPLE_BYTES = 1 << 18  # of text, to measure the speed of preparing it
_MIN_BYTES_PER_SECOND = 30_000  # of the time of a run: this much text is prepared in time on any machine
Phase = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]


class TooFewTokensError(DataError):
    """The text is shorter than one sequence."""


def no_phase(_label: str, _total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """Show nothing: the default for `phase`."""
    return nullcontext(lambda _n: None)


def as_data_options(data: DataOptions | Sequence[str | Path]) -> DataOptions:
    """Return `data` as DataOptions; paths are the sources."""
    return data if isinstance(data, DataOptions) else DataOptions(data)


def as_tokenizer_options(tokenizer: TokenizerOptions | str | Path | None) -> TokenizerOptions:
    """Return `tokenizer` as TokenizerOptions."""
    return tokenizer if isinstance(tokenizer, TokenizerOptions) else TokenizerOptions(tokenizer)


def prepared_source(sources: Sequence[str | Path]) -> Path | None:
    """Return the folder of prepared data that `sources` consists of; None for text.

    Raises:
        DataError: Prepared data is mixed with other sources.
    """
    folders = [Path(s) for s in sources if is_prepared(s)]
    if folders and len(sources) > 1:
        hint = "it alone, or text files"
        raise DataError(f"{folders[0]} is prepared data and can't be mixed with other sources", hint)
    return folders[0] if folders else None


def check_sources(data: DataOptions, tokenizer: TokenizerOptions) -> Path | None:
    """Return the folder of prepared data, or None for text. Raises DataError for options that contradict it."""
    prepared = prepared_source(data.sources)
    if prepared and data.validation:
        raise DataError(f"{prepared} is prepared already, with its own validation part", "mlxlm prepare --validation")
    if prepared and data.weights:
        raise DataError(f"{prepared} is prepared already, with its own weights", "mlxlm prepare PATH=WEIGHT ...")
    if (stream := unseekable_source(data.sources)) is not None and tokenizer.path is None:
        hint = "a file, or mlxlm pretrain --tokenizer PATH"
        raise DataError(f"{stream} can be read only once, so it can't train a tokenizer too", hint)
    return prepared


def existing_tokenizer(options: TokenizerOptions, prepared: Path | None) -> Tokenizer | None:
    """Load the tokenizer at `options.path` or of the prepared data; None if one has to be trained."""
    if options.path is not None:
        return open_tokenizer(options.path)
    return load(prepared / "tokenizer") if prepared else None


def train_tokenizer(
    data: DataOptions, options: TokenizerOptions, vocab_size: int, seed: int, phase: Phase = no_phase
) -> Tokenizer:
    """Train a tokenizer on the text that `prepare` trains on, without what it holds out for validation.

    `vocab_size` is reduced if the text doesn't support it, unless `options.vocab_size` asks for it.
    """
    label = f"training a {options.tokenizer_type} tokenizer of {vocab_size} tokens"
    with phase(label, num_bytes(data, data.sources)) as advance:
        texts = training_texts(data, seed=seed, progress=advance)
        return train(texts, vocab_size, options.tokenizer_type, exact=options.vocab_size is not None)


def limit_text(
    data: DataOptions, seconds: float, prepare_sample: Callable[[DataOptions, Path], Any], phase: Phase = no_phase
) -> tuple[DataOptions, TextLimited | None]:
    """Return `data` with as much of its text as can be prepared in a part of `seconds`, and an event if that isn't all.

    Args:
        data: The text.
        seconds: Until the end of the run.
        prepare_sample: Prepares a sample of the text in a new folder, as all of it would be.
        phase: See `start_run`.
    """
    total = None if unseekable_source(data.sources) else total_bytes([*data.sources, *data.validation])
    if total is None or total <= max(_SAMPLE_BYTES, _MIN_BYTES_PER_SECOND * seconds):
        return data, None
    sample = _SAMPLE_BYTES / total
    with phase("measuring the speed of preparing text", None), TemporaryDirectory() as folder:
        start = time.monotonic()
        prepare_sample(replace(data, fraction=sample), Path(folder, "data"))
        sample_seconds = time.monotonic() - start
    fraction = max(sample, sample * PREPARATION_FRACTION * seconds / sample_seconds)
    if fraction >= 1:
        return data, None
    return replace(data, fraction=fraction), TextLimited(round(fraction * total), total)


def num_bytes(data: DataOptions, paths: Sequence[str | Path]) -> int | None:
    """Return the bytes of `paths` that are read; None if stdin is among them."""
    total = total_bytes(paths)
    return None if total is None else round(data.fraction * total)


def prepare_shards(data: DataOptions, tokenizer: Tokenizer, out: Path, seed: int, phase: Phase = no_phase) -> Path:
    """Tokenize the text into the folder `out`, and return `out`."""
    with phase("preparing tokens", num_bytes(data, [*data.sources, *data.validation])) as advance:
        prepare(data, tokenizer, out, seed=seed, progress=advance)
    return out


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer, data: Path) -> None:
    """Raise DataError if the shards in `data` were made with another tokenizer."""
    if manifest.fingerprint != tokenizer.fingerprint:
        raise DataError(f"{data} was prepared with another tokenizer", "the one it was prepared with")


def check_shards(manifest: Manifest, tokenizer: Tokenizer, max_seq_length: int, data: Path) -> None:
    """Raise DataError if the shards in `data` were made with another tokenizer, or have too few tokens."""
    check_tokenizer(manifest, tokenizer, data)
    if (tokens := manifest.train.tokens) < max_seq_length + 1:
        hint = f"--max-seq-length {tokens - 1}, or more text" if tokens > 2 else "more text"
        raise TooFewTokensError(f"the text has {tokens} tokens, less than one sequence of {max_seq_length}", hint)
    if manifest.validation.tokens < 2 or manifest.validation.bytes == 0:
        raise DataError("nothing is held out for validation", "more documents, or mlxlm pretrain --validation FILE")
