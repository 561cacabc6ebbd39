"""Prefill and decoding of one text: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial

from mlxlm.backend.mlx import mx
from mlxlm.cache import PREFILL_STEP_SIZE
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import async_eval, clear_memory_cache_at, wired_limit

OnPrefill = Callable[[int], None] | None


def generate_tokens(
    context: Context,
    prompt: Sequence[int],
    sampler: Callable[[mx.array], mx.array],
    max_tokens: int,
    *,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    on_prefill: OnPrefill = None,
) -> Generator[int]:
    """Yield up to `max_tokens` ids that follow `prompt`.

    Where a text becomes longer than the original context of "longrope", it is read again with the other factors.

    Step t+1 is dispatched before token t is read, so that the device never waits for Python.

    Closing the generator at any yield is exact: `context` then holds the prompt and every token yielded, except for the
    last one if `max_tokens` was reached, which is never fed back. Any exception inside a step, such as
    KeyboardInterrupt, empties the context, since its layers may be at different positions. One raised by
    `on_prefill` keeps the chunks read so far.

    Args:
        context: Keeps its longest common prefix with `prompt`; only the rest is read.
        prompt: At least one id.
        sampler: Maps logits `[1, V]` to a token `[1]`, without evaluating anything. Its `accept`, if any, is called
            with every token. With `needs_last_token`, only the forward pass of step t+1 is dispatched ahead, and the
            token is drawn after `accept`.
        max_tokens: At least 1.
        prefill_step_size: The prompt is read in chunks of this size, each evaluated before the next.
        on_prefill: Called after each chunk with the number of tokens in the context.

    Raises:
        GenerationError: If another text has used `context` between two yields. The context stays the other text's.
    """
    generate = partial(_generate_tokens, context, sampler, prefill_step_size)
    return read_again_if_long(generate, context, prompt, max_tokens, on_prefill)


def read_again_if_long(
    generate: Callable[[Sequence[int], int, OnPrefill], Generator[int]],
    context: Context,
    prompt: Sequence[int],
    max_tokens: int,
    on_prefill: OnPrefill,
) -> Generator[int]:
    """Yield from `generate(prompt, max_tokens, on_prefill)`; in two parts if the factors of "longrope" change between.

    The second part reads the whole text again, as transformers' Phi-3 does: keys with other factors would be wrong.
    """
    room = context.tokens_before_long_factors(len(prompt))
    if room < max_tokens:
        text = list(prompt)
        with closing(generate(prompt, room, on_prefill)) as tokens:
            for token in tokens:
                text.append(token)
                version = context.version
                yield token
        context.check_unchanged(version)
        prompt, max_tokens, on_prefill = text, max_tokens - room, None
    yield from generate(prompt, max_tokens, on_prefill)


def _generate_tokens(
    context: Context,
    sampler: Callable[[mx.array], mx.array],
    prefill_step_size: int,
    prompt: Sequence[int],
    max_tokens: int,
    on_prefill: OnPrefill,
) -> Generator[int]:
    needs_last_token, accept = getattr(sampler, "needs_last_token", False), getattr(sampler, "accept", None)
    with wired_limit():
        num_cached = context.trim_to_prefix(prompt)
        context.read(prompt[num_cached:-1], prefill_step_size, on_prefill)

        with context.transaction() as ids:
            token = async_eval(sampler(context.decode(mx.array(prompt[-1:], mx.int32))))
            ids.append(prompt[-1])
        for step in range(1, max_tokens + 1):
            with context.transaction() as ids:
                following = None
                if step < max_tokens:
                    logits = context.decode(token)
                    following = async_eval(logits if needs_last_token else sampler(logits))
                value = token.item()
                if following is not None:
                    ids.append(value)
                if accept is not None:
                    accept(value)
                clear_memory_cache_at(step)
            version = context.version
            yield value
            if following is None:
                return
            context.check_unchanged(version)
            if needs_last_token:
                with context.transaction():
                    following = async_eval(sampler(following))
            token = following
