"""Requests, and the comparison of their texts with those that they give alone."""

import random

import pytest

from mlxlm.generation import Engine, GenerationOptions, Request

rng = random.Random(0)
SYSTEM = [rng.randrange(300) for _ in range(40)]
OPTIONS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 1.2, "seed": 2**63, "top_p": 0.8, "stop": ["e", "th"]},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1.0, "regex": "[a-c]{2,5}x"},
    {"temperature": 1.0, "choice": ["The fox", "The dog", "lazy"]},
    {"temperature": 0.8, "presence_penalty": 0.5, "dry_multiplier": 0.8, "logit_bias": {7: 3}},
]


def request(prompt=(5, 6, 7, 8), max_tokens=20, snapshot_at=None, **options):
    """One that never ends by an end token."""
    options = {"temperature": 1.0, "seed": 3, "deterministic": False, **options, "max_tokens": max_tokens}
    return Request(list(prompt), GenerationOptions.of(**options), frozenset(), snapshot_at)


def greedy(ids, max_tokens=4):
    return Request(ids, GenerationOptions(temperature=0, max_tokens=max_tokens, seed=1))


def alone(lm, request, kv=None):
    return Engine(lm, kv=kv, batch_size=1, prefix_cache_bytes=0).submit(request).result()


def same(one, other):
    for name in ("text", "tokens", "finish_reason", "seed", "prompt_tokens", "constraint_error"):
        assert getattr(one, name) == getattr(other, name)
    if other.logprobs is not None:
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)
