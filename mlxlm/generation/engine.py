"""Prefill and decode: token ids in, token ids out, with an exact account of what the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mlxlm import platform
from mlxlm._mlx import ON_CPU, mx
from mlxlm.cache import make_cache

PREFILL_CHUNK = 512  # tokens; bounds the memory of a prompt's scores, [H, 512, S] a layer
CLEAR_EVERY = 256  # tokens; the step in which KVCache grows and leaves its old buffers to the allocator


class Context:
    """A model's key-value caches (one per layer) and `ids`, the tokens that they hold.

    `ids` and the caches agree whenever no generator of `tokens` is running or it is suspended at a yield.
    """

    def __init__(self, model):
        self.model = model
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.caches = make_cache(self.model)
        self.ids: list[int] = []

    def keep_prefix(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Forget whatever `prompt` doesn't begin with; return how many of its tokens are held.

        At most `len(prompt) - 1`, since the last one must be read again for its logits. Caches that can't
        be shortened (recurrent states, full sliding windows) are emptied where that would be needed, and so are
        those whose positions are others in a text that will have `max_tokens` more ("longrope").
        """
        length, change = len(prompt) + max_tokens, getattr(self.model, "positions_change", None)
        if change is not None and self.ids and (length > change) != (self.caches[0].reach > change):
            self.clear()
        kept = 0
        for held, wanted in zip(self.ids, prompt[:-1], strict=False):
            if held != wanted:
                break
            kept += 1
        surplus = len(self.ids) - kept
        if surplus and kept and all(cache.is_trimmable() for cache in self.caches):
            for cache in self.caches:
                cache.trim(surplus)
            del self.ids[kept:]
        elif surplus:
            self.clear()
        if change is not None:
            for cache in self.caches:
                cache.reach = length
        return len(self.ids)


def tokens(
    context: Context,
    prompt: Sequence[int],
    sampler: Callable[[mx.array], mx.array],
    max_tokens: int,
    *,
    prefill_chunk: int = PREFILL_CHUNK,
    on_prefill: Callable[[int], None] | None = None,
) -> Iterator[int]:
    """Yield up to `max_tokens` (at least 1) ids that follow `prompt` (at least one id).

    The prompt's prefix that `context` already holds is not read again; the rest is read in chunks, each
    evaluated before the next. `on_prefill(n)` is told after each chunk how many tokens the context holds.
    `sampler` maps logits `[1, V]` to a token `[1]` and must not evaluate: step t+1 is dispatched before
    token t is read, so that the device never waits for Python.

    Closing the generator at any yield is exact: `context` then holds the prompt and every token yielded,
    without the last one only where `max_tokens` was reached, as it was never fed back. An exception (a
    KeyboardInterrupt inside a step, say) may find layers at different positions: the context is emptied. One
    raised by `on_prefill` leaves the chunks that were read.
    """
    done = context.keep_prefix(prompt, max_tokens)
    model, caches = context.model, context.caches
    with _wired_memory():
        while done < len(prompt) - 1:
            chunk = prompt[done : min(done + prefill_chunk, len(prompt) - 1)]
            with _emptied_on_error(context):
                # The logits of these positions are never evaluated: only the caches are.
                model(mx.array([chunk]), cache=caches)
                with platform.interrupts_held():
                    mx.eval([cache.state for cache in caches])
                _clear_allocator()
                context.ids.extend(chunk)
            done += len(chunk)
            if on_prefill is not None:
                on_prefill(done)

        def step(token: mx.array) -> mx.array:
            drawn = sampler(model(token[None], cache=caches)[:, -1])
            with platform.interrupts_held():
                mx.async_eval(drawn)
            return drawn

        with _emptied_on_error(context):
            token = step(mx.array(prompt[-1:]))
            context.ids.append(prompt[-1])
        for n in range(1, max_tokens + 1):
            with _emptied_on_error(context):
                following = step(token) if n < max_tokens else None
                value = token.item()
                if following is not None:
                    context.ids.append(value)
                if n % CLEAR_EVERY == 0:
                    _clear_allocator()
            yield value
            token = following


@contextmanager
def _emptied_on_error(context: Context) -> Iterator[None]:
    try:
        yield
    except BaseException:
        context.clear()
        raise


def _clear_allocator() -> None:
    # On a GPU, freed buffers of ever new sizes pile up in the allocator's cache. On a CPU it is bounded.
    if not ON_CPU:
        mx.clear_cache()


_wired = {"users": 0, "before": 0}


@contextmanager
def _wired_memory() -> Iterator[None]:
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
