"""Throughput of `mlxlm prepare`, compared with encode_batch of the tokenizers library on the same text.

    python benchmarks/data_throughput.py wikitext2-valid.txt --megabytes 32
    python benchmarks/data_throughput.py wikitext2-valid.txt --megabytes 300 --rounds 1     # memory of a large file

The text is repeated to this size. Each round: encode_batch of its pieces, or of the first 2000 (no
reading, no writing, no ids taken out), then `prepare` in this process, from file to shards; for a byte-level BPE and a
SentencePiece model trained on the text, or the tokenizers given. At last the `mlxlm prepare` command, whose peak
resident memory is measured; --dedup adds the search for near-duplicates (with the text cut into one document a line).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from common import in_turn, median, report, spread, timed_command

from mlxlm.data import DataOptions, prepare, read_documents
from mlxlm.tokenizer import Tokenizer, load, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokenizer", type=Path, action="append", default=[], help="instead of those trained here")
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pieces", type=int, default=2000, help="of the text, at most, for encode_batch: 33 MB")
    parser.add_argument("--dedup", type=float, help="the option of mlxlm prepare")
    options = parser.parse_args()
    content = options.text.read_text(encoding="utf-8")
    tokenizers = {path.name: load(path) for path in options.tokenizer} or {
        kind: train([content], options.vocab_size, kind) for kind in ("byte-level", "sentencepiece")
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = repeated(content, folder, options)
        rows, result = [], {"megabytes": options.megabytes, "rounds": options.rounds, "dedup": options.dedup}
        for kind, tokenizer in tokenizers.items():
            more, result[kind] = measured(kind, tokenizer, file, folder, options)
            rows += more
    report(f"{options.text.name}, {options.megabytes} MB", rows, result)


def repeated(content: str, folder: Path, options: argparse.Namespace) -> Path:
    """Write a file of this size; with --dedup as JSON lines, with a document for each line of the text."""
    file = folder / ("text.txt" if options.dedup is None else "text.jsonl")
    if options.dedup is not None:
        lines = [line for line in content.splitlines() if line.strip()]
        content = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    block = content.encode("utf-8")
    with file.open("wb") as out:
        for _ in range(max(1, options.megabytes * 1_000_000 // len(block))):
            out.write(block)
    return file


def measured(kind: str, tokenizer: Tokenizer, file: Path, folder: Path, options: argparse.Namespace):
    """Rows for the table, and numbers."""
    pieces = list(islice((piece for document in read_documents([file]) for piece in document.pieces), options.pieces))
    out = folder / "out"
    tokens: list[int] = []

    def library() -> float:
        start = time.perf_counter()
        encoded = tokenizer._runtime.encode_batch_fast(pieces, add_special_tokens=False)
        seconds = time.perf_counter() - start
        return sum(map(len, encoded)) / seconds

    def ours() -> float:
        shutil.rmtree(out, ignore_errors=True)
        start = time.perf_counter()
        manifest = prepare(DataOptions([file], dedup=options.dedup), tokenizer, out)
        tokens.append(manifest.train.tokens + manifest.validation.tokens)
        return tokens[-1] / (time.perf_counter() - start)

    results = in_turn(options.rounds, **{f"{kind} library": library, f"{kind} prepare": ours})
    theirs, mine = results.values()
    shutil.rmtree(out)
    saved = folder / f"tokenizer-{kind}"
    tokenizer.save(saved)
    mlxlm = [sys.executable, "-c", "from mlxlm.cli.main import main; main()"]
    dedup = [] if options.dedup is None else ["--dedup", str(options.dedup)]
    seconds, peak, _ = timed_command(
        [*mlxlm, "prepare", str(file), "--tokenizer", str(saved), "--out", str(out), *dedup]
    )
    shutil.rmtree(out)
    rows = [
        (f"{kind}: encode_batch, tokens/s", spread(theirs)),
        (f"{kind}: prepare, tokens/s", spread(mine)),
        (f"{kind}: ratio of the medians", f"{median(mine) / median(theirs):.2f}"),
        (f"{kind}: the command, tokens/s", f"{tokens[-1] / seconds:,.4g}"),
        (f"{kind}: the command, peak memory", f"{peak / 1e6:.0f} MB"),
    ]
    numbers = {"encode_batch": theirs, "prepare": mine, "tokens": tokens[-1], "command_s": seconds, "peak_bytes": peak}
    return rows, numbers


if __name__ == "__main__":
    main()
