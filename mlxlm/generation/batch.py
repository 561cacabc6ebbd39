"""Many texts at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlm.errors import MlxlmError
from mlxlm.generation.loaded import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.result import Result
from mlxlm.generation.text import TextStream


@dataclass(frozen=True)
class Request:
    """One text to generate: the prompt's ids, its options, and end tokens that replace the model's."""

    prompt: Sequence[int]
    options: GenerationOptions
    end_ids: frozenset[int] | None = None


def run_batch(
    loaded: LoadedModel,
    requests: Iterable[Request | None],
    *,
    kv=None,
    batch_size: int = 32,
    on_progress: Callable[..., None] | None = None,
) -> Iterator[tuple[int, Result | MlxlmError]]:
    """The results of `requests`, each with its index, as they finish."""
    for index, request in enumerate(r for r in requests if r is not None):
        try:
            text = TextStream(loaded, request.prompt, request.options, kv=kv, end_ids=request.end_ids)
            for _ in text:
                pass
            yield index, text.result
        except MlxlmError as error:
            yield index, error


def batch(
    loaded: LoadedModel,
    prompts: Sequence[str | Sequence[int]],
    *,
    samples: int = 1,
    kv=None,
    batch_size: int = 32,
    **options: Any,
) -> list[Result]:
    """Continue every prompt `samples` times; the results in the order of the prompts, then of the samples."""
    settings = GenerationOptions.of(**options)
    ids = [loaded.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    requests = [Request(prompt, settings) for prompt in ids for _ in range(samples)]
    results: list[Any] = [None] * len(requests)
    for index, result in run_batch(loaded, requests, kv=kv, batch_size=batch_size):
        if isinstance(result, MlxlmError):
            raise result
        results[index] = result
    return results
