"""Results as JSON objects: the lines of `generate --jsonl` and the output of `generate --json`."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from mlxlm.backend.error_text import describe_error
from mlxlm.generation.jsonl.requests import BadRequest, Sample
from mlxlm.generation.logprobs import TokenLogprob, TokenLogprobs
from mlxlm.generation.result import GenerationResult
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import MlxlmError


def result_fields(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a result that are equal in two equal runs."""
    values: dict[str, Any] = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tokens": len(result.tokens),
        "prompt_tokens": result.prompt_tokens,
        "seed": result.seed,
    }
    if result.logprobs is not None:
        values["logprobs"] = [_logprobs_fields(token, tokenizer) for token in result.logprobs]
    if result.constraint_error is not None:
        values["constraint_error"] = result.constraint_error
    return values


def full_result_fields(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """All fields of a result, timings included."""
    values = result_fields(result, tokenizer)
    values |= {"cached_tokens": result.cached_tokens, "timings": asdict(result.timings)}
    if result.speculation is not None:
        values["speculation"] = asdict(result.speculation)
    return values


def sample_fields(sample: Sample, result: GenerationResult | MlxlmError, tokenizer: Tokenizer) -> dict[str, Any]:
    """The line of a sample: id, number (if there are several), digest of the request, and the result or its error."""
    task = sample.task
    number = {"sample": sample.number} if task.num_samples > 1 else {}
    head = {"id": task.id} | number | {"request": task.digest}
    if isinstance(result, MlxlmError):
        return head | {"line": task.line, "error": describe_error(result)}
    return head | result_fields(result, tokenizer)


def bad_request_fields(error: BadRequest) -> dict[str, Any]:
    """The line for a request that can't be served."""
    return {"id": error.id, "line": error.line, "error": describe_error(error)}


def has_failed(fields: dict[str, Any]) -> bool:
    """Whether a line is an error or an incomplete constrained text, which a later run tries again."""
    return "error" in fields or "constraint_error" in fields


def _logprobs_fields(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    values = _logprob_fields(logprobs, tokenizer)
    if logprobs.top_logprobs:
        values["top_logprobs"] = [_logprob_fields(entry, tokenizer) for entry in logprobs.top_logprobs]
    return values


def _logprob_fields(entry: TokenLogprob | TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    content = tokenizer.token_bytes(entry.token) if entry.bytes is None else entry.bytes
    return {
        "token": entry.token,
        "text": content.decode("utf-8", "replace"),
        "bytes": None if entry.bytes is None else list(entry.bytes),
        # float32 has no more digits. JSON has no infinity: None is a token that the model rules out.
        "logprob": round(entry.logprob, 6) if math.isfinite(entry.logprob) else None,
    }
