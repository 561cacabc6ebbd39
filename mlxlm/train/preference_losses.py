"""Losses over preferences, for batches of `mlxlm.data.pairs`: DPO, ORPO and KTO."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mlxlm.backend.mlx import mx, nn
from mlxlm.data.pairs import CHOSEN, MISMATCHED
from mlxlm.model import Decoder
from mlxlm.train.step import Loss, LossSums


def answer_logps(
    model: Decoder, tokens: mx.array, segment_ids: mx.array, mask: mx.array, width: int
) -> tuple[mx.array, mx.array]:
    """Return the log-probability of each answer, and its number of tokens.

    Args:
        model: The model.
        tokens: Int `[B, T + 1]`.
        segment_ids: Int `[B, T]`: the number of the document in its row.
        mask: float32 `[B, T]`: 1 for each target in an answer.
        width: P, the documents that a row can have.

    Returns:
        Sums in nats, and counts, float32 `[B, P]`.
    """
    hidden = model.model(tokens[:, :-1], segment_ids=segment_ids)
    losses = model.cross_entropy(hidden, tokens[:, 1:], reduction="none")
    in_answer = (segment_ids[..., None] == mx.arange(width)) * mask[..., None]
    return -(in_answer * losses.reshape(mask.shape)[..., None]).sum(1), in_answer.sum(1)


def dpo_loss(
    model: Decoder,
    tokens: mx.array,
    segment_ids: mx.array,
    mask: mx.array,
    kinds: mx.array,
    reference_logps: mx.array,
    *,
    beta: float,
) -> LossSums:
    """Direct preference optimization (Rafailov et al. 2023, equation 7), summed over pairs.

    -log σ(β · (log π(chosen) / π_ref(chosen) - log π(rejected) / π_ref(rejected))). The rewards among the metrics are
    β · log(π / π_ref). For the arguments see `mlxlm.data.pairs.PairBatch`, and `loss` of `TrainStep`.
    """
    logps, counts = _pair_logps(model, tokens, segment_ids, mask, kinds.shape[-1])
    rewards = beta * (logps - reference_logps)
    is_pair = (kinds[:, 0] > 0).astype(mx.float32)
    losses = -nn.log_sigmoid(rewards[:, 0] - rewards[:, 1])
    return (losses * is_pair).sum(), is_pair.sum(), _pair_metrics(rewards, is_pair, logps, counts)


def orpo_loss(
    model: Decoder, tokens: mx.array, segment_ids: mx.array, mask: mx.array, kinds: mx.array, *, beta: float
) -> LossSums:
    """Odds ratio preference optimization (Hong et al. 2024, equations 6 and 7), summed over pairs.

    -log P(chosen) - β · log σ(log(odds(chosen) / odds(rejected))), with odds = P / (1 - P), where P is the geometric
    mean of the probabilities of an answer's tokens. β is the paper's λ. The rewards among the metrics are β · log P.
    """
    logps, counts = _pair_logps(model, tokens, segment_ids, mask, kinds.shape[-1])
    is_pair = (kinds[:, 0] > 0).astype(mx.float32)
    # -1 where there is no pair: 0 would have an infinite odds ratio, whose gradient is not a number
    means = mx.where(is_pair[:, None] > 0, logps / mx.maximum(counts, 1.0), -1.0)
    log_odds = means - _log1mexp(means)
    losses = -means[:, 0] - beta * nn.log_sigmoid(log_odds[:, 0] - log_odds[:, 1])
    return (losses * is_pair).sum(), is_pair.sum(), _pair_metrics(beta * means, is_pair, logps, counts)


def kto_loss(
    model: Decoder,
    tokens: mx.array,
    segment_ids: mx.array,
    mask: mx.array,
    kinds: mx.array,
    reference_logps: mx.array,
    *,
    beta: float,
) -> LossSums:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, equations 7 and 8), summed over examples.

    1 - σ(β · (r - z)) for a desirable answer and 1 - σ(β · (z - r)) for an undesirable one, with r = log(π / π_ref).
    The reference point z is the mean of r over the rows given, but at least 0, of answers to other prompts, and a
    constant for the gradient. As in the paper and in TRL, it is that of the rows that are computed together: with
    several micro-batches or CPU cores each has its own.
    """
    width = kinds.shape[-1]
    logps, counts = answer_logps(model, tokens[:, 0], segment_ids[:, 0], mask[:, 0], width)
    others, _ = answer_logps(model, tokens[:, 1], segment_ids[:, 1], mask[:, 1], width)
    mismatched = (kinds[:, 1] == MISMATCHED).astype(mx.float32)
    differences = mx.stop_gradient(others - reference_logps[:, 1]) * mismatched
    kl = mx.maximum(differences.sum() / mx.maximum(mismatched.sum(), 1.0), 0.0)
    chosen, is_example = kinds[:, 0] == CHOSEN, kinds[:, 0] > 0
    rewards = beta * (logps - reference_logps[:, 0])
    losses = 1 - mx.sigmoid(mx.where(chosen, rewards - beta * kl, beta * kl - rewards))
    weights = is_example.astype(mx.float32)
    metrics = {
        "rewards/chosen": _sum_and_count(rewards, chosen),
        "rewards/rejected": _sum_and_count(rewards, is_example & ~chosen),
        "kl": mx.stack([kl, mx.array(1.0)]),
        "nll_loss": _nll(logps, counts, chosen),
    }
    return (losses * weights).sum(), weights.sum(), metrics


_LOSSES: dict[str, Callable[..., LossSums]] = {"dpo": dpo_loss, "orpo": orpo_loss, "kto": kto_loss}


def preference_loss(name: str, beta: float) -> Loss:
    """Return the loss of this name: "dpo", "orpo" or "kto"."""
    return partial(_LOSSES[name], beta=beta)


def _pair_logps(
    model: Decoder, tokens: mx.array, segment_ids: mx.array, mask: mx.array, width: int
) -> tuple[mx.array, mx.array]:
    """Return `answer_logps` of chosen and rejected answers, `[B, 2, P]`, in one forward pass."""
    logps, counts = answer_logps(model, tokens.flatten(0, 1), segment_ids.flatten(0, 1), mask.flatten(0, 1), width)
    return logps.reshape(-1, 2, width), counts.reshape(-1, 2, width)


def _pair_metrics(rewards: mx.array, is_pair: mx.array, logps: mx.array, counts: mx.array) -> dict[str, mx.array]:
    """Return the metrics of rewards `[B, 2, P]`, with TRL's names. A tie is a wrong preference."""
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    values = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected, "accuracies": chosen > rejected}
    metrics = {f"rewards/{name}": _sum_and_count(value, is_pair) for name, value in values.items()}
    return {**metrics, "nll_loss": _nll(logps[:, 0], counts[:, 0], is_pair)}


def _nll(logps: mx.array, counts: mx.array, is_chosen: mx.array) -> mx.array:
    """Return the summed negative log-likelihood of chosen answers, and their number of tokens."""
    return mx.stop_gradient(mx.stack([-(logps * is_chosen).sum(), (counts * is_chosen).sum()]))


def _sum_and_count(values: mx.array, weights: mx.array) -> mx.array:
    weights = weights.astype(mx.float32)
    return mx.stop_gradient(mx.stack([(values * weights).sum(), weights.sum()]))


def _log1mexp(x: mx.array) -> mx.array:
    """Compute log(1 - exp(x)) of x < 0 without cancellation (Mächler 2012)."""
    x = mx.minimum(x, -1e-7)  # answers of probability 1, whose odds are infinite
    near = x > -0.6931472
    # Each branch has an argument that is safe for the gradient where the other one is taken.
    return mx.where(near, mx.log(-mx.expm1(mx.where(near, x, -0.1))), mx.log1p(-mx.exp(mx.where(near, -1.0, x))))
