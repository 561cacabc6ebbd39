"""Finish reasons, ids and numbers of tokens, as OpenAI's API has them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from mlxlm.generation import FinishReason, GenerationResult

# A constraint that no token can continue leaves a text incomplete, as a limit does.
FINISH_REASONS: dict[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "constraint": "length",
}


def new_id(prefix: str) -> str:
    """A random id, such as chatcmpl-0123456789abcdef01234567."""
    return f"{prefix}{secrets.token_hex(12)}"


def usage(results: Sequence[GenerationResult], n: int, reasoning_tokens: int = 0) -> dict[str, Any]:
    """The tokens of a request; the prompt of `n` texts counts once."""
    prompts = results[::n]
    prompt_tokens = sum(result.prompt_tokens for result in prompts)
    completion_tokens = sum(len(result.tokens) for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in prompts)},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }
