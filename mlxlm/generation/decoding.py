"""Prefill and decode: token ids in, token ids out, with an exact account of what the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.generation.context import PREFILL_STEP_SIZE, Context, async_eval, clear_memory_cache

# Tokens; on a GPU the step in which caches grow. On a CPU as fast, and 9,000 tokens take 0.35 GB instead of 0.55.
CLEAR_CACHE_INTERVAL = 16 if ON_CPU else 256


def generate_tokens(
    context: Context,
    prompt: Sequence[int],
    sampler: Callable[[mx.array], mx.array],
    max_tokens: int,
    *,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    on_prefill: Callable[[int], None] | None = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` (at least 1) ids that follow `prompt` (at least one id).

    The prompt's prefix that `context` already holds is not read again; the rest is read in chunks, each
    evaluated before the next. `on_prefill(n)` is told after each chunk how many tokens the context holds.

    `sampler` maps logits `[1, V]` to a token `[1]` and must not evaluate: step t+1 is dispatched before token t is
    read, so that the device never waits for Python. If it has `accept`, that is told every token as it is read; if
    its `needs_last_token` is true, only the forward pass of step t+1 is dispatched by then, and the draw waits until token t
    was observed and taken.

    Closing the generator at any yield is exact: `context` then holds the prompt and every token yielded,
    without the last one only where `max_tokens` was reached, as it was never fed back. An exception (a
    KeyboardInterrupt inside a step, say) may find layers at different positions: the context is emptied. One
    raised by `on_prefill` leaves the chunks that were read. Raises GenerationError where another text has
    used `context` between two yields, which stays that one's.
    """
    needs_last_token, accept = getattr(sampler, "needs_last_token", False), getattr(sampler, "accept", None)
    model = context.model
    with wired_limit():
        held = context.trim_to_prefix(prompt, max_tokens)
        context.read(prompt[held:-1], prefill_step_size, on_prefill)

        def forward(token: mx.array) -> mx.array:
            return model(token[None], cache=context.caches)[:, -1]

        with context.transaction() as ids:
            token = async_eval(sampler(forward(mx.array(prompt[-1:]))))
            ids.append(prompt[-1])
        for n in range(1, max_tokens + 1):
            with context.transaction() as ids:
                following = None
                if n < max_tokens:
                    logits = forward(token)
                    following = async_eval(logits if needs_last_token else sampler(logits))
                value = token.item()
                if following is not None:
                    ids.append(value)
                if accept is not None:
                    accept(value)
                if n % CLEAR_CACHE_INTERVAL == 0:
                    clear_memory_cache()
            seen = context.version
            yield value
            if following is None:
                return
            context.check_unchanged(seen)
            if needs_last_token:
                with context.transaction():
                    following = async_eval(sampler(following))
            token = following


_wired = {"users": 0, "before": 0}


@contextmanager
def wired_limit() -> Iterator[None]:
    """On Metal, keep weights and cache resident: macOS would page out a large model between tokens.

    The first of several texts at once raises the limit, the last one lowers it.
    """
    if ON_CPU or not mx.metal.is_available():
        yield
        return
    if _wired["users"] == 0:
        _wired["before"] = mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])
    _wired["users"] += 1
    try:
        yield
    finally:
        _wired["users"] -= 1
        if _wired["users"] == 0:
            mx.synchronize()  # the limit must not change under a step in flight
            mx.set_wired_limit(_wired["before"])
