"""Text into token shards: bounded memory, all or nothing."""

from __future__ import annotations

import copy
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from mlxlm.data.bad_input import BadInput
from mlxlm.data.dedup import DuplicateFilter
from mlxlm.data.document_reader import DocumentReader
from mlxlm.data.manifest import MANIFEST_FILE, Manifest, TrainPart
from mlxlm.data.options import DataOptions, source_name
from mlxlm.data.shards import ShardWriter
from mlxlm.data.split import ValidationSplit, min_documents_to_split, validation_draws
from mlxlm.data.text import Advance, Document
from mlxlm.data.tokenize import Chunk, tokenize
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import DataError
from mlxlm.utils.files import atomic_new_folder
from mlxlm.utils.json_files import write_json

Encode = Callable[[Document], Iterable[Chunk]]


def prepare(
    data: DataOptions,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    seed: int = 0,
    shard_tokens: int = 1 << 26,
    encode: Encode | None = None,
    progress: Advance | None = None,
) -> Manifest:
    """Tokenize text into the folder `out`, which must be new or empty.

    `out` gets, for each split ("train", "validation"):

    - <split>-00000.bin, ...: tokens, little-endian uint16 where the vocabulary fits, else uint32; `shard_tokens` in
      each file but the last.
    - <split>-00000.idx.npy: int64 offsets of the documents that start in the shard.
    - <split>-00000.mask.bin: for conversations, the loss mask, uint8.

    and tokenizer/ and manifest.json. It appears complete or not at all: the work is done in a hidden folder beside it.
    Memory: a few megabytes of text at a time, the document offsets of one shard, and the index of `data.dedup`.

    Validation is `data.validation`, or what `ValidationSplit` holds out of each source. To decide that, the first few
    documents are read twice; stdin and named pipes are copied to disk first.

    Args:
        data: Sources and how to read them. With weights, each source is a part of the manifest with its own shards.
        tokenizer: Encodes the text, see `tokenize`, and is saved with the tokens.
        out: Folder to make.
        seed: Draws the documents for validation.
        shard_tokens: Tokens per file.
        encode: Encodes a whole document, instead of `tokenize`, into any number of documents that stay in one split. A
            DataError that it raises counts as bad input.
        progress: Called with the number of bytes read since the last call.

    Returns:
        The manifest.

    Raises:
        DataError: A source is unusable or has no text, `out` is in use, or the disk can't be written.
    """
    fraction = None if data.validation else data.validation_fraction
    with atomic_new_folder(out, DataError) as folder, ExitStack() as stack:
        reader = DocumentReader(data.stdin, data.text_column)
        parts = _parts(data)
        if fraction and encode is None:
            parts = [(name, weight, reader.spool_streams(paths, folder, stack)) for name, weight, paths in parts]
        bad = BadInput(data.on_bad_input)
        builder = _Builder(tokenizer, folder, shard_tokens, stack, reader, bad, data.dedup, encode, progress)
        for name, weight, paths in parts:
            builder.add_part(name, weight, paths, fraction, seed)
        if data.validation:
            builder.add(data.validation, builder.validation)
        tokenizer.save(folder / "tokenizer")
        return builder.finish([source_name(path) for path in (*data.sources, *data.validation)])


def training_texts(data: DataOptions, *, seed: int = 0, progress: Advance | None = None) -> Iterator[str]:
    """The text that `prepare` trains on with the same arguments, in pieces: for training a tokenizer.

    Sources are read twice, as far as `ValidationSplit` needs it, so they can't be stdin or pipes.
    """
    reader = DocumentReader(None, data.text_column)
    fraction = 0 if data.validation else data.validation_fraction
    for _, _, paths in _parts(data):
        split = ValidationSplit(lambda paths=paths: reader(paths, BadInput(data.on_bad_input)), fraction, seed)
        for held_out, document in split(reader(paths, BadInput(data.on_bad_input), progress)):
            contents = (content for _, content in document.messages or ())
            for piece in itertools.chain(document.pieces, contents):
                if not held_out:
                    yield piece


def _parts(data: DataOptions) -> list[tuple[str, float, Sequence[str | Path]]]:
    """Name, weight and paths of each part of the training text."""
    if data.weights is None:
        return [("all", 1.0, data.sources)]
    named = zip(data.source_names(), data.weights, data.sources, strict=True)
    return [(name, weight, [path]) for name, weight, path in named]


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
        self._parts: list[TrainPart] = []
        self._splits: set[str] = set()
        self.validation = self._writer("validation", 0)

    def add_part(
        self, name: str, weight: float, paths: Sequence[str | Path], fraction: float | None, seed: int
    ) -> None:
        """Write `paths` as a part: `fraction` of it for validation; None: all of it for training."""
        train = self._writer("train", sum(len(part.train.shards) for part in self._parts))
        if fraction is None:
            self.add(paths, train)
            self._splits.add("files")
        elif self._encode is not None:
            self._encode_and_split(paths, train, fraction, seed)
            self._splits.add("documents")
        else:
            split = ValidationSplit(lambda: self._read_before(paths), fraction, seed)
            self._tokenize_and_split(split, paths, train)
            self._splits.add(split.kind)
        self._parts.append(TrainPart(name, weight, train.finish()))
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
            validation_split=self._splits.pop() if len(self._splits) == 1 else "mixed",
            num_conversations=self._chat_documents,
            sources=sources,
            parts=self._parts,
            validation=self.validation.finish(),
            dedup=self._unique and self._unique.found,
            skipped=self._bad.skipped,
        )
        write_json(self._folder / MANIFEST_FILE, result.to_dict())
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
