"""How likely a model finds continuations of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from mlxlm.backend.mlx import mx
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.kernels import cross_entropy
from mlxlm.utils.errors import CheckpointError

_LOGITS = 32 << 20  # values that are made at once: 128 MB in float32
_CHUNK = 256  # tokens of a row that are read at once, at most
_ROWS = 32  # side by side


class Loglikelihood(NamedTuple):
    """logprob: natural, the sum over the continuation's tokens. greedy: whether each of them is the likeliest one."""

    logprob: float
    is_greedy: bool


class LoglikelihoodScorer:
    """Likelihoods under one model. What a prompt has in common with the one before isn't read again, and what is asked
    for one prompt is read side by side."""

    def __init__(self, lm: LoadedModel):
        self._loaded = lm
        self._context = Context(lm.model)

    def score(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Loglikelihood]:
        """Of each of `continuations` behind `prompt`; all are ids, one or more, that fit into the model's context.

        Raises CheckpointError where the model's logits are not numbers.
        """
        before, rows = list(prompt[:-1]), [[*prompt[-1:], *ids] for ids in continuations]
        if not self._loaded.supports_batching or len(rows) == 1:
            return [self._alone(before, row) for row in rows]
        self._read_prompt(before, max(map(len, rows)))
        return [found for i in range(0, len(rows), _ROWS) for found in self._side_by_side(rows[i : i + _ROWS])]

    def _read_prompt(self, before: list[int], more: int) -> None:
        held = self._context.trim_to_prefix([*before, 0], more)
        self._context.read(before[held:])

    def _alone(self, before: list[int], row: list[int]) -> Loglikelihood:
        """`row` begins with the prompt's last token."""
        self._read_prompt(before, len(row))
        with self._context.transaction() as held:
            [found] = self._values(self._context.caches, [row])
            held.extend(row[:-1])
        return _likelihood(*found)

    def _side_by_side(self, rows: list[list[int]]) -> list[Loglikelihood]:
        """Over copies of the caches. Shorter rows are padded behind, where they don't look."""
        caches = [cache.copy() for cache in self._context.caches]
        if len(self._context):
            for cache in caches:
                cache.select([0] * len(rows))
        longest = max(map(len, rows))
        found = self._values(caches, [row + [0] * (longest - len(row)) for row in rows])
        return [
            _likelihood(logprobs[: len(row) - 1], likeliest[: len(row) - 1])
            for row, (logprobs, likeliest) in zip(rows, found, strict=True)
        ]

    def _values(self, caches: list, rows: list[list[int]]) -> list[tuple[list[float], list[bool]]]:
        """For each row and each of its tokens but the first: log p, and whether no other token is likelier."""
        tokens = mx.array(rows)
        columns = max(1, min(_CHUNK, _LOGITS // (len(rows) * self._loaded.config.vocab_size)))
        found: list[tuple[list[float], list[bool]]] = [([], []) for _ in rows]
        for start in range(0, tokens.shape[1] - 1, columns):
            part = tokens[:, start : start + columns + 1]
            logits = self._loaded.model(part[:, :-1], cache=caches).astype(mx.float32)
            chosen = mx.take_along_axis(logits, part[:, 1:, None], axis=-1)[..., 0]
            logprobs, likeliest = -cross_entropy(logits, part[:, 1:]), chosen >= logits.max(axis=-1)
            eval_caches(caches, logprobs, likeliest)
            for row, more in zip(found, zip(logprobs.tolist(), likeliest.tolist(), strict=True), strict=True):
                row[0].extend(more[0])
                row[1].extend(more[1])
        return found


def _likelihood(logprobs: list[float], likeliest: list[bool]) -> Loglikelihood:
    total = math.fsum(logprobs)
    if math.isnan(total):
        raise CheckpointError("the model's logits are not numbers", "a checkpoint without NaN")
    return Loglikelihood(total, all(likeliest))
