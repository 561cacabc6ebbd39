"""Log-likelihoods of continuations of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mlxlm.backend.mlx import mx
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import eval_caches
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.kernels import cross_entropy
from mlxlm.utils.errors import CheckpointError, ConfigError

_MAX_LOGITS = 32 << 20  # values computed at a time: 128 MB in float32
_MAX_COLUMNS = 256  # tokens of a row in one forward pass
_BATCH_SIZE = 32


class Loglikelihood(NamedTuple):
    """The log-likelihood of a continuation.

    Attributes:
        logprob: Sum of the natural log-probabilities of its tokens.
        is_greedy: Whether greedy decoding would produce it.
    """

    logprob: float
    is_greedy: bool


def start_token_id(lm: LoadedModel) -> int:
    """The token before a text without context: BOS, else EOS. Raises ConfigError if the tokenizer has neither."""
    ids = lm.tokenizer.bos_token_id, lm.tokenizer.eos_token_id, *sorted(lm.eos_token_ids)
    for id in ids:
        if id is not None:
            return id
    raise ConfigError("the tokenizer has neither a BOS nor an EOS token", "another model")


class LoglikelihoodScorer:
    """Scores continuations with one model.

    The prefix that a prompt shares with the previous one is not computed again, and the continuations of a prompt are
    computed in batches.
    """

    def __init__(self, lm: LoadedModel):
        self._loaded = lm
        self._context = Context(lm.model)

    def score(self, prompt: Sequence[int], continuations: Sequence[Sequence[int]]) -> list[Loglikelihood]:
        """Score each continuation of a prompt.

        Args:
            prompt: Token ids, one or more.
            continuations: Token ids, one or more each, that fit the model's context behind the prompt.

        Raises:
            CheckpointError: The model's logits are NaN.
        """
        # The prompt's last token predicts the first token of each continuation.
        prefix, rows = list(prompt[:-1]), [[*prompt[-1:], *ids] for ids in continuations]
        if not self._loaded.supports_batching or len(rows) == 1:
            return [self._score_row(prefix, row) for row in rows]
        self._prefill(prefix, max(map(len, rows)))
        batches = (rows[i : i + _BATCH_SIZE] for i in range(0, len(rows), _BATCH_SIZE))
        return [score for batch in batches for score in self._score_batch(batch)]

    def _prefill(self, prefix: list[int], room: int) -> None:
        cached = self._context.trim_to_prefix([*prefix, 0], len(prefix) + room)
        self._context.read(prefix[cached:])

    def _score_row(self, prefix: list[int], row: list[int]) -> Loglikelihood:
        self._prefill(prefix, len(row))
        with self._context.transaction() as ids:
            [(logprobs, is_greedy)] = self._token_scores(self._context.caches, [row])
            ids.extend(row[:-1])
        return _loglikelihood(logprobs, is_greedy)

    def _score_batch(self, rows: list[list[int]]) -> list[Loglikelihood]:
        """Score rows with copies of the caches. Shorter rows are right-padded, which causal attention doesn't see."""
        caches = [cache.copy() for cache in self._context.caches]
        if len(self._context):
            for cache in caches:
                cache.select([0] * len(rows))
        longest = max(map(len, rows))
        scores = self._token_scores(caches, [row + [0] * (longest - len(row)) for row in rows])
        return [
            _loglikelihood(logprobs[: len(row) - 1], is_greedy[: len(row) - 1])
            for row, (logprobs, is_greedy) in zip(rows, scores, strict=True)
        ]

    def _token_scores(self, caches: list[Any], rows: list[list[int]]) -> list[tuple[list[float], list[bool]]]:
        """For each token of each row but the first: its log-probability, and whether no token is more likely."""
        tokens = mx.array(rows)
        columns = max(1, min(_MAX_COLUMNS, _MAX_LOGITS // (len(rows) * self._loaded.config.vocab_size)))
        scores: list[tuple[list[float], list[bool]]] = [([], []) for _ in rows]
        for start in range(0, tokens.shape[1] - 1, columns):
            part = tokens[:, start : start + columns + 1]
            logits = self._loaded.model(part[:, :-1], cache=caches).astype(mx.float32)
            target_logits = mx.take_along_axis(logits, part[:, 1:, None], axis=-1)[..., 0]
            logprobs, is_greedy = -cross_entropy(logits, part[:, 1:]), target_logits >= logits.max(axis=-1)
            eval_caches(caches, logprobs, is_greedy)
            for row, row_logprobs, row_is_greedy in zip(scores, logprobs.tolist(), is_greedy.tolist(), strict=True):
                row[0].extend(row_logprobs)
                row[1].extend(row_is_greedy)
        return scores


def _loglikelihood(logprobs: list[float], is_greedy: list[bool]) -> Loglikelihood:
    total = math.fsum(logprobs)
    if math.isnan(total):
        raise CheckpointError("the model's logits are NaN", "a checkpoint without NaN")
    return Loglikelihood(total, all(is_greedy))
