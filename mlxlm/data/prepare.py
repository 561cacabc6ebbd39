"""Text into token shards: bounded memory, all or nothing."""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO

import numpy as np

from mlxlm.data.bad_input import BadInput
from mlxlm.data.dedup import DuplicateFilter
from mlxlm.data.document_reader import DocumentReader
from mlxlm.data.manifest import FILE, Manifest, WeightedPart, normalize_weights
from mlxlm.data.shards import ShardWriter
from mlxlm.data.sources import STDIN
from mlxlm.data.split import ValidationSplit, check_fraction, min_documents_to_split, validation_draws
from mlxlm.data.text import Advance, Document
from mlxlm.data.tokenize import Chunk, tokenize
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import DataError
from mlxlm.utils.files import atomic_new_folder, write_json

Encode = Callable[[Document], Iterable[Chunk]]


def prepare(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    weights: Sequence[float] | None = None,
    text_column: str | None = None,
    dedup: float | None = None,
    validation_fraction: float = 0.05,
    validation_paths: Sequence[str | Path] = (),
    seed: int = 0,
    on_bad_input: str = "stop",
    shard_tokens: int = 1 << 26,
    progress: Callable[[int], None] | None = None,
    stdin: IO[bytes] | None = None,
    encode: Encode | None = None,
) -> Manifest:
    """Tokenize `paths` (see `documents`; tokens as of `tokenize`) into the folder `out`, new or empty.

    `out` gets, for each split ("train", "validation"), <split>-00000.bin (little-endian uint16 where the
    vocabulary fits, else uint32; `shard_tokens` tokens each, the last one less) with <split>-00000.idx.npy
    (int64 offsets of the documents that start in it), where it has conversations <split>-00000.mask.bin (uint8, which
    tokens are to be learned), tokenizer/, and manifest.json. It appears complete or not at all: the work is done in a
    hidden folder beside it. Memory: a few megabytes of text at a time, and the document offsets of one shard.

    weights: for each of `paths` the share of training tokens to be drawn from it (their sum is taken as 1). Each then
        becomes a part of the manifest, in shards of its own. None: one part, whose text is seen in equal measure.
    text_column: see `documents`.
    dedup: leave out documents that are as similar to an earlier one as this (Jaccard similarity, above 0 and at most
        1), or the same; see `mlxlm.data.dedup`, which also states the memory that it takes.

    Validation is `validation_paths` if given. Otherwise it is of each part what `ValidationSplit` holds out: one document out of
    each 1/`validation_fraction`, drawn by `seed`; with too few documents for that (20, or 1/fraction) the last
    `validation_fraction` of the text, from the start of a line. To decide that, the first few documents are read twice;
    stdin and named pipes are copied to disk before.

    on_bad_input: "stop" or "skip", see `BadInput`.
    progress: called with the number of bytes read since the last call.
    encode: makes the tokens of a whole document, instead of `tokenize`, as any number of documents of their own, which
        stay in one split. None of them is cut then, so that of few the last one or more are held out. What it raises a
        DataError for is bad input.

    Raises DataError for unusable sources, sources without text, an `out` in use, and a disk that cannot be
    written.
    """
    paths = list(paths)
    check_fraction(validation_fraction)
    groups = _groups(paths, weights)
    fraction = None if validation_paths else validation_fraction
    bad = BadInput(on_bad_input)
    with atomic_new_folder(out, DataError) as folder, ExitStack() as stack:
        reader = DocumentReader(stdin, text_column)
        if fraction and encode is None:
            groups = [(name, weight, reader.spool_streams(group, folder, stack)) for name, weight, group in groups]
        builder = _Builder(tokenizer, folder, shard_tokens, stack, reader, bad, dedup, encode, progress)
        for name, weight, group in groups:
            builder.add_part(name, weight, group, fraction, seed)
        if validation_paths:
            builder.add(validation_paths, builder.validation)
        tokenizer.save(folder / "tokenizer")
        return builder.finish([_source_name(path) for path in (*paths, *validation_paths)])


def training_texts(
    paths: Sequence[str | Path],
    *,
    weights: Sequence[float] | None = None,
    text_column: str | None = None,
    validation_fraction: float = 0.05,
    validation_paths: Sequence[str | Path] = (),
    seed: int = 0,
    on_bad_input: str = "stop",
    progress: Advance | None = None,
) -> Iterator[str]:
    """The text that `prepare` trains on with the same arguments, in pieces, without what it holds out; for training a
    tokenizer. Sources are read twice, as far as `ValidationSplit` needs it: they can't be stdin or pipes."""
    check_fraction(validation_fraction)
    reader = DocumentReader(None, text_column)
    fraction = 0 if validation_paths else validation_fraction
    for _, _, group in _groups(list(paths), weights):
        split = ValidationSplit(lambda group=group: reader(group, BadInput(on_bad_input)), fraction, seed)
        for held_out, document in split(reader(group, BadInput(on_bad_input), progress)):
            said = (content for _, content in document.messages or ())
            for piece in itertools.chain(document.pieces, said):
                if not held_out:
                    yield piece


def _groups(paths: list[str | Path], weights: Sequence[float] | None) -> list[tuple[str, float, list[str | Path]]]:
    """Name, weight and paths of every part."""
    return [("all", 1.0, paths)] if weights is None else _weighted_groups(paths, weights)


def _weighted_groups(paths: list[str | Path], weights: Sequence[float]) -> list[tuple[str, float, list[str | Path]]]:
    if len(weights) != len(paths):
        raise DataError(f"{len(paths)} sources have {len(weights)} weights", "one weight for each source")
    try:
        weights = normalize_weights(list(weights))
    except ValueError as error:
        raise DataError(str(error), "weights such as 0.7 and 0.3") from None
    names: list[str] = []
    for path in paths:
        name = _source_name(path)
        numbered = (f"{name} ({number})" for number in itertools.count(2))
        names.append(name if name not in names else next(other for other in numbered if other not in names))
    return [(name, weight, [path]) for name, weight, path in zip(names, weights, paths, strict=True)]


def _source_name(path: str | Path) -> str:
    """Names, not absolute paths: a dataset may be published."""
    return "stdin" if str(path) == STDIN else Path(path).name or str(path)


class _Builder:
    """Tokenizes documents into the shards of the two splits."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        folder: Path,
        shard_tokens: int,
        stack: ExitStack,
        reader: DocumentReader,
        bad: BadInput,
        dedup: float | None,
        encode: Encode | None,
        progress: Advance | None,
    ):
        self._tokenizer = tokenizer
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._stack = stack
        self._reader = reader
        self._bad = bad
        self._dedup = dedup
        self._unique = None if dedup is None else DuplicateFilter(dedup)
        self._encode = encode
        self._progress = progress
        self._dtype_name = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._dtype = np.dtype(self._dtype_name).newbyteorder("<")
        self._chat_documents = 0
        self._parts: list[WeightedPart] = []
        self._splits: set[str] = set()
        self.validation = self._writer("validation", 0)

    def add_part(
        self, name: str, weight: float, paths: Sequence[str | Path], fraction: float | None, seed: int
    ) -> None:
        """Write `paths` as a part: `fraction` of it for validation; None: all of it for training."""
        train = self._writer("train", sum(len(part.train.shards) for part in self._parts))
        if fraction is None:
            self.add(paths, train)
            self._splits.add("given")
        elif self._encode is not None:
            self._encode_and_split(paths, train, fraction, seed)
            self._splits.add("document")
        else:
            split = ValidationSplit(lambda: self._read_before(paths), fraction, seed)
            self._tokenize_and_split(split, paths, train)
            self._splits.add(split.kind)
        self._parts.append(WeightedPart(name, weight, train.finish()))
        if not self._parts[-1].train.tokens:
            raise DataError(f"nothing of {name} is left to train on", "a source with more text")

    def _writer(self, split: str, first: int) -> ShardWriter:
        writer = ShardWriter(self._folder, split, self._dtype, self._shard_tokens, first)
        return self._stack.enter_context(closing(writer))

    def add(self, paths: Sequence[str | Path], writer: ShardWriter) -> None:
        if self._encode is None:
            chunks = tokenize(self._read(paths), self._tokenizer)
        else:
            chunks = itertools.chain.from_iterable(self._encoded(paths))
        for chunk in chunks:
            writer.add(*chunk)

    def _tokenize_and_split(self, split: ValidationSplit, paths: Sequence[str | Path], train: ShardWriter) -> None:
        held_out: deque[bool] = deque()  # of the documents that are being tokenized

        def noted() -> Iterator[Document]:
            for held, document in split(self._read(paths)):
                held_out.append(held)
                yield document

        target = train
        for chunk in tokenize(noted(), self._tokenizer):
            if chunk.starts_document:
                target = self.validation if held_out.popleft() else train
            target.add(*chunk)

    def _encode_and_split(self, paths: Sequence[str | Path], train: ShardWriter, fraction: float, seed: int) -> None:
        writers = (self.validation if held else train for held in validation_draws(fraction, seed))
        few, waiting = min_documents_to_split(fraction), []  # documents until there are enough to draw from
        for chunks in self._encoded(paths):
            waiting.append(chunks)
            if few <= len(waiting):
                few = 0
                _write(waiting, writers)
                waiting = []
        if waiting:
            held = min(len(waiting) - 1, math.ceil(fraction * len(waiting)))
            _write(waiting[: len(waiting) - held], itertools.repeat(train))
            _write(waiting[len(waiting) - held :], itertools.repeat(self.validation))

    def _encoded(self, paths: Sequence[str | Path]) -> Iterator[list[Chunk]]:
        for document in self._read(paths):
            try:
                chunks = list(self._encode(document))
            except DataError as error:
                self._chat_documents -= document.messages is not None
                self._bad(error)
            else:
                yield chunks

    def finish(self, sources: list[str]) -> Manifest:
        """Complete the shards of validation, then the manifest."""
        result = Manifest(
            fingerprint=self._tokenizer.fingerprint,
            vocab_size=self._tokenizer.vocab_size,
            dtype=self._dtype_name,
            split=self._splits.pop() if len(self._splits) == 1 else "mixed",
            num_conversations=self._chat_documents,
            sources=sources,
            parts=self._parts,
            validation=self.validation.finish(),
            duplicates=self._unique and self._unique.found,
            skipped=self._bad.skipped,
        )
        write_json(self._folder / FILE, result.to_dict())
        return result

    def _read(self, paths: Sequence[str | Path]) -> Iterator[Document]:
        document = None
        read_before = self._unique.found.documents if self._unique else 0
        source = self._reader(paths, self._bad, self._progress)
        for document in source if self._unique is None else self._unique(source):
            self._chat_documents += document.messages is not None
            yield document
        if document is None and self._unique and self._unique.found.documents > read_before:
            raise DataError("all documents of a source repeat earlier ones", "preparing without it, or without dedup")
        if document is None:
            skipped = f": all {self._bad.skipped} lines were skipped as bad input" if self._bad.skipped else ""
            raise DataError(f"there is no text in the sources{skipped}", "files with some text")

    def _read_before(self, paths: Sequence[str | Path]) -> Iterator[Document]:
        """What `_read` will give, counted nowhere."""
        source = self._reader(paths, copy.copy(self._bad))
        return source if self._unique is None else copy.deepcopy(self._unique)(source)


def _write(documents: Iterable[Iterable[Chunk]], writers: Iterator[ShardWriter]) -> None:
    for document, writer in zip(documents, writers, strict=False):
        for chunk in document:
            writer.add(*chunk)
