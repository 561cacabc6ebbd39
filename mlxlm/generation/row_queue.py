"""Chooses which of the waiting texts begin together."""

from __future__ import annotations

from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.generation.prefill import MIN_SHARED_PREFIX
from mlxlm.generation.running_batch import Row


def take_similar(waiting: list[Row], count: int) -> tuple[list[Row], list[Row]]:
    """Choose up to `count` texts: the oldest, and those most like it in their beginning or length.

    Returns:
        Those, and the others in their order.
    """
    if not count or not waiting:
        return [], waiting
    oldest = waiting[0].text.prompt

    def distance(index: int) -> tuple[int, int, int]:
        prompt = waiting[index].text.prompt
        shared = common_prefix_length(oldest, prompt)
        # By powers of two: among prompts with the same system prompt, the length decides.
        rank = shared.bit_length() if shared >= MIN_SHARED_PREFIX else 0
        return -rank, abs(len(prompt) - len(oldest)), index

    chosen = sorted(range(len(waiting)), key=distance)[:count]
    rest = sorted(set(range(len(waiting))) - set(chosen))
    return [waiting[i] for i in chosen], [waiting[i] for i in rest]
