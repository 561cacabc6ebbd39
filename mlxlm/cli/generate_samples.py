"""`mlxlm generate --num-samples`: several texts for one prompt, generated as a batch and printed in order."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

from mlxlm.chat.terminal.output import write
from mlxlm.cli import render
from mlxlm.cli.generation_options import CONSTRAINT_HINTS
from mlxlm.cli.spinner import spinner
from mlxlm.generation import Engine, Request, run_batch
from mlxlm.generation.engine import ordered_results
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.jsonl import full_result_fields
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.formatting import human_bytes


def print_samples(engine: Engine, request: Request, count: int, as_json: bool, verbose: bool) -> None:
    """Print `count` texts with an empty line between them, or one JSON object each.

    Raises GenerationError at the end if a constrained text is incomplete.
    """
    if request.options.seed is None:
        request = replace(request, options=replace(request.options, seed=random_seed()))
    requests = (request.sample("1", number) for number in range(count))
    start, tokens, peak, incomplete = time.monotonic(), 0, 0, None
    with closing(run_batch(engine, requests)) as batch:
        results = ordered_results(batch)
        for number in range(count):
            with spinner(f"printed {number} of {count} texts"):
                result = next(results)
            tokens, peak = tokens + len(result.tokens), max(peak, result.timings.peak_memory_bytes)
            incomplete = incomplete or (result if result.constraint_error is not None else None)
            if as_json:
                render.emit_json({"sample": number} | full_result_fields(result, engine.lm.tokenizer))
            else:
                write(("\n" if number else "") + result.text + "\n")
    if verbose:
        seconds = time.monotonic() - start
        render.say(
            f"prompt {len(request.prompt)} tokens; {count} texts, {tokens} tokens in {seconds:.1f} s, "
            f"{tokens / seconds:.1f} tokens/s; peak memory of MLX's arrays {human_bytes(peak)}",
            style="dim",
        )
    if incomplete is not None:
        raise GenerationError(
            f"not every text is complete: {incomplete.constraint_error}", CONSTRAINT_HINTS.get(incomplete.finish_reason)
        )
