"""`mlxlm generate --samples`: several texts for one prompt, made at once and printed in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxlm.cli.waiting import waiting
from mlxlm.errors import GenerationError, MlxlmError

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
    from mlxlm.cli.render import emit_json
    from mlxlm.generation.result_lines import whole_fields

    started, tokens, peak, complaint = time.monotonic(), 0, 0, None
    with closing(_in_order(loaded, asked)) as results:
        for number, result in enumerate(results):
            tokens, peak = tokens + len(result.tokens), max(peak, result.timings.peak_memory_bytes)
            complaint = complaint or result.complaint
            if asked.as_json:
                emit_json({"sample": number} | whole_fields(result, loaded.tokenizer))
            else:
                write(("\n" if number else "") + result.text + "\n")
    if asked.verbose:
        _say_statistics(asked, tokens, time.monotonic() - started, peak)
    if complaint is not None:
        raise GenerationError(f"not every text is complete: {complaint}")


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
    from mlxlm.cli.render import human_bytes, say

    say(
        f"prompt {len(asked.ids)} tokens; {asked.count} texts, {tokens} tokens in {seconds:.1f} s, "
        f"{tokens / seconds:.1f} tokens/s; peak {human_bytes(peak)}",
        style="dim",
    )
