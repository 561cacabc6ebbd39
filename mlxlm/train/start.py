"""From a person's text to a run that is ready to train: tokenizer, shards, configuration, settings."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO, Any

from mlxlm.config import ModelConfig
from mlxlm.data import CHAT_TEMPLATE, Manifest, prepare, texts, total_bytes
from mlxlm.data.manifest import FILE as MANIFEST
from mlxlm.data.sources import STDIN
from mlxlm.errors import CheckpointError, ConfigError, DataError, os_errors_as
from mlxlm.files import check_free
from mlxlm.tokenizer import Tokenizer, load, train
from mlxlm.train.loop import measure_step
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings, default_learning_rate

TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, "Chinchilla", table 3)
# Of the time given in minutes, this share is left for validation, saving and a machine that slows down.
_OVERHEAD = 0.12

Phase = Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]]


def no_phase(_label: str, _total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    """Shows nothing: the default for `phase`."""
    return nullcontext(lambda _n: None)


def start_run(
    out: Path | str,
    sources: Sequence[str | Path],
    config: ModelConfig,
    *,
    tokenizer: str | Path | None = None,
    kind: str = "byte-level",
    vocab_size: int | None = None,
    validation: Sequence[str | Path] = (),
    validation_fraction: float = 0.05,
    minutes: float | None = None,
    tokens: int | None = None,
    settings: dict[str, Any] | None = None,
    stdin: IO[bytes] | None = None,
    phase: Phase = no_phase,
) -> Run:
    """Make the run `out` that trains `config` on `sources`.

    sources: what `mlxlm.data.documents` takes, or one folder made by `mlxlm.data.prepare`.
    tokenizer: a folder or file; None trains one of `kind` with `vocab_size` tokens (default: the
        configuration's) on the sources. The configuration gets the tokenizer's vocabulary size and ids.
    minutes, tokens: how long to train, instead of `settings["steps"]`; by default 20 tokens a parameter.
        Minutes are turned into steps by timing three steps here.
    settings: fields of TrainSettings; the learning rate defaults by model size.
    phase: called with a label and a total in bytes (or None) for each phase that takes a while; the context
        it returns yields a function to be called with the bytes done.

    Raises CheckpointError if `out` exists, and DataError, TokenizerError or ConfigError for what can't work.
    """
    out = Path(out)
    check_free(out, CheckpointError, f"mlxlm pretrain --resume {out}, or another --out")
    settings = dict(settings or {})
    prepared = _prepared(sources)
    if prepared and validation:
        raise DataError(f"{prepared} is prepared already, with its own validation part", "mlxlm prepare --validation")
    if STDIN in map(str, sources) and tokenizer is None:
        raise DataError("stdin can be read only once, so it can't train a tokenizer too", "--tokenizer PATH, or a file")
    words = _tokenizer(prepared or sources, tokenizer, kind, vocab_size or config.vocab_size, phase)
    config = _with_tokenizer(config, words, settings)
    with os_errors_as(CheckpointError, "write", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        workspace = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        data = prepared or workspace / "data"
        if not prepared:
            with phase("preparing tokens", total_bytes([*sources, *validation])) as advance:
                prepare(
                    sources, words, data, validation_paths=validation, validation_fraction=validation_fraction,
                    seed=settings.get("seed", 0), progress=advance, stdin=stdin,
                )  # fmt: skip
        manifest = Manifest.read(data)
        _check_length(manifest, settings)
        with phase("timing a training step", None) if minutes else nullcontext():
            chosen = _settings(config, settings, minutes, tokens)
        if manifest.chat_documents:
            # An answer ends with the end of its turn, a text with the end of its document.
            config = config.with_changes(eos_token_id=[words.eos_id, words.special_tokens["<|end|>"]])
        # Without conversations in the text there are no roles to speak of: such a model continues texts.
        words.chat_template = CHAT_TEMPLATE if manifest.chat_documents else None
        return Run.create(out, config, chosen, words, data, adopt=not prepared)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _prepared(sources: Sequence[str | Path]) -> Path | None:
    folders = [Path(s) for s in sources if (Path(s) / MANIFEST).exists()]
    if folders and len(sources) > 1:
        raise DataError(f"{folders[0]} is prepared data and can't be mixed with other sources", "one of them alone")
    return folders[0] if folders else None


def _tokenizer(
    sources: Path | Sequence[str | Path], path: str | Path | None, kind: str, vocab_size: int, phase: Phase
) -> Tokenizer:
    if path is not None:
        return load(path)
    if isinstance(sources, Path):
        inside = sources / "tokenizer"
        if not inside.is_dir():
            raise DataError(f"{sources} has no tokenizer folder", "--tokenizer with the one it was prepared with")
        return load(inside)
    with phase(f"training a {kind} tokenizer of {vocab_size} tokens", total_bytes(sources)) as advance:
        return train(texts(sources, advance=advance), vocab_size, kind)


def _with_tokenizer(config: ModelConfig, tokenizer: Tokenizer, settings: dict[str, Any]) -> ModelConfig:
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    context = max(config.max_position_embeddings, settings.get("sequence_length", 0))
    return config.with_changes(vocab_size=tokenizer.vocab_size, max_position_embeddings=context, **ids)


def _check_length(manifest: Manifest, settings: dict[str, Any]) -> None:
    """Raise a DataError if a part of the data is shorter than one sequence."""
    length = settings.get("sequence_length", TrainSettings.sequence_length)
    shortest = min(manifest.train.tokens, manifest.validation.tokens)
    if shortest < length + 1:
        part = "training" if manifest.train.tokens == shortest else "validation"
        hint = f"--sequence-length {max(1, shortest - 1)}, or more text"
        raise DataError(f"the {part} part has {shortest} tokens, less than one sequence of {length}", hint)


def _settings(
    config: ModelConfig, values: dict[str, Any], minutes: float | None, tokens: int | None
) -> TrainSettings:
    values.setdefault("learning_rate", default_learning_rate(config.parameter_count()))
    if sum(x is not None for x in (minutes, tokens, values.get("steps"))) > 1:
        raise ConfigError("steps, tokens and minutes each say how long to train", "only one of them")
    if values.get("steps") is not None:
        return TrainSettings(**values)
    draft = TrainSettings(**{**values, "steps": 1})
    if minutes is not None:
        if not 0 < minutes < float("inf"):
            raise ConfigError(f"minutes is {minutes}", "a positive number")
        steps = int(minutes * 60 * (1 - _OVERHEAD) / measure_step(config, draft))
    else:
        budget = TOKENS_PER_PARAMETER * config.parameter_count() if tokens is None else tokens
        steps = -(-budget // draft.tokens_per_step)
    return TrainSettings(**{**values, "steps": max(1, steps)})

