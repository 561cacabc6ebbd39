"""`mlxlm generate --samples`: several texts for one prompt, made at once and printed in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxlm.cli.waiting import waiting
from mlxlm.errors import GenerationError, MlxlmError
from mlxlm.units import human_bytes

if TYPE_CHECKING:
    from mlxlm.cache import KVOptions
    from mlxlm.generation import GenerationOptions, LoadedModel, Result


@dataclass(frozen=True)
class Samples:
    """What the command line asks for: `count` texts after the prompt `ids`."""

    ids: list[int]
    end_ids: frozenset[int]
    options: GenerationOptions
    kv: KVOptions
    count: int
    batch_size: int
    as_json: bool
    verbose: bool


def print_samples(loaded: LoadedModel, asked: Samples) -> None:
    """Texts with an empty line between them, or a JSON object each; their seeds are those of `generation.batch`."""
    from mlxlm.chat.terminal import write
    from mlxlm.cli.jsonl import write_line
    from mlxlm.generation.result_lines import line_of, whole_fields

    started, tokens, peak, broken = time.monotonic(), 0, 0, None
    with closing(_in_order(loaded, asked)) as results:
        for number, result in enumerate(results):
            tokens, peak = tokens + len(result.tokens), max(peak, result.timings.peak_memory_bytes)
            broken = broken or (result if result.complaint is not None else None)
            if asked.as_json:
                write_line(line_of({"sample": number} | whole_fields(result, loaded.tokenizer)))
            else:
                write(("\n" if number else "") + result.text + "\n")
    if asked.verbose:
        _say_statistics(asked, tokens, time.monotonic() - started, peak)
    if broken is not None:
        hint = "a larger --max-tokens" if broken.finish_reason == "length" else None
        raise GenerationError(f"not every text is complete: {broken.complaint}", hint)


def _in_order(loaded: LoadedModel, asked: Samples) -> Iterator[Result]:
    from mlxlm.generation import Request, run_batch
    from mlxlm.generation.noise import derived_seed, draw_seed

    seed = draw_seed() if asked.options.seed is None else asked.options.seed
    requests = (
        Request(asked.ids, replace(asked.options, seed=derived_seed(seed, "1", sample)), asked.end_ids)
        for sample in range(asked.count)
    )
    held: dict[int, Result] = {}
    batch = run_batch(loaded, requests, kv=asked.kv, batch_size=asked.batch_size)
    with closing(batch):
        for following in range(asked.count):
            with waiting(f"{following} of {asked.count} texts are printed"):
                while following not in held:
                    index, result = next(batch)
                    if isinstance(result, MlxlmError):
                        raise result
                    held[index] = result
            yield held.pop(following)


def _say_statistics(asked: Samples, tokens: int, seconds: float, peak: int) -> None:
    from mlxlm.cli.tally import say

    say(
        f"prompt {len(asked.ids)} tokens; {asked.count} texts, {tokens} tokens in {seconds:.1f} s, "
        f"{tokens / seconds:.1f} tokens/s; peak {human_bytes(peak)}"
    )
