"""Which draws are certain: those whose token no change of the logits by at most half a margin each could change.

Neither through the order of the scores nor through what a filter keeps. Every logit is assumed to change in the worst
direction, so that a few draws count as uncertain that aren't.
"""

from __future__ import annotations

from functools import reduce
from operator import and_, or_

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import KVOptions
from mlxlm.generation.logit_filters import FILTERS, Draw, FilteredLogits, Number, Numbers
from mlxlm.generation.options import GenerationOptions


def margin_for(kv: KVOptions) -> float | None:
    """Twice what rounding may change a logit by, so the lead that a token needs over the runner-up. None on a GPU.

    On a CPU it is many times the difference between several rows computed at once and one, in the logits and in the
    keys and values left behind. Measured in float32 with models of 14M to 82M parameters and up to 33 rows: 1e-5, and
    with a quantized cache, which rounds a difference to another step, 0.002.

    On a GPU no margin helps. Its products sum in another order for several rows, and are rounded to half precision. In
    simulated bfloat16 (`benchmarks/rounding.py`) this changes leads of SmolLM2-135M by up to 0.5, with 4-bit weights 6,
    and 1 to 3% of the tokens. Deciding each by a pass over its row alone leaves as many: its keys and values are those
    of the batch.
    """
    if not ON_CPU:
        return None
    return 0.03 if kv.key_bits or kv.value_bits else 0.002


def margin_numbers(options: GenerationOptions, margin: float, vocab_size: int) -> dict[str, float]:
    """The numbers that the functions of this file need for a margin of the model's logits."""
    # A repetition penalty multiplies or divides differences between logits.
    margin *= max(options.repetition_penalty, 1 / options.repetition_penalty)
    if not options.temperature:
        return {"margin": margin}
    numbers = {"margin": margin / options.temperature}
    for one in FILTERS:
        if one.numbers(options, vocab_size):
            numbers |= one.margin_numbers(options, numbers["margin"], vocab_size)
    return numbers


def certain_draws(scores: mx.array, tokens: mx.array, margin: Number) -> mx.array:
    """Whether draws without filters are certain: whether each token leads the runner-up by the margin.

    Args:
        scores: `[R, V]`.
        tokens: The tokens of the highest scores, int32 `[R]`; -1 for none.
        margin: In units of the scores.

    Returns:
        bool `[R]`.
    """
    tokens = _column(tokens)
    lead = mx.take_along_axis(scores, tokens, axis=-1) - _without(scores, tokens).max(axis=-1, keepdims=True)
    return (lead.astype(mx.float32) >= margin).squeeze(-1)


def certain_filtered_draws(
    logits: mx.array, noise: mx.array, tokens: mx.array, numbers: Numbers, filtered: FilteredLogits
) -> mx.array:
    """Whether draws with filters are certain.

    Without filters, some tokens would lead the drawn one, or follow it by less than the margin; the rival is the most
    likely of them. A draw is certain if every filter surely keeps its token, and one surely removes the rival, and so
    all that are less likely.

    Args:
        logits: What is filtered, float32 `[R, V]`; the highest of a row is 0.
        noise: What is subtracted from the filtered logits, `[R, V]`.
        tokens: The tokens of the highest differences, int32 `[R]`; -1 for none.
        numbers: Those of `filter_numbers` and `margin_numbers`.
        filtered: The result of the filters.

    Returns:
        bool `[R]`.
    """
    filters = [one for one in FILTERS if one.option in numbers]
    if any(one.verdict is None for one in filters):
        return mx.zeros(tokens.shape, mx.bool_)
    tokens, scores, margin = _column(tokens), logits - noise, numbers["margin"]
    is_close = _without(scores, tokens) > mx.take_along_axis(scores, tokens, axis=-1) - margin
    rival = mx.where(is_close, logits, -mx.inf).max(axis=-1, keepdims=True)
    draw = Draw(logits, filtered, mx.take_along_axis(logits, tokens, axis=-1), rival, margin)
    verdicts = [one.verdict(draw, numbers) for one in filters if one.verdict is not None]
    removed = reduce(or_, (surely_removed for _, surely_removed in verdicts), mx.isneginf(rival))
    return reduce(and_, (surely_kept for surely_kept, _ in verdicts), removed).squeeze(-1)


def _column(tokens: mx.array) -> mx.array:
    """Tokens `[R]` as indices `[R, 1]`."""
    return mx.expand_dims(mx.maximum(tokens, 0), -1)


def _without(scores: mx.array, tokens: mx.array) -> mx.array:
    """Scores `[R, V]`, with -inf for `tokens` `[R, 1]`."""
    return mx.put_along_axis(scores, tokens, mx.array(-mx.inf, scores.dtype), axis=-1)
