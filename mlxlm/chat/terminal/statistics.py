"""What an answer cost, and how near that was to what the machine can do."""

from __future__ import annotations

from mlxlm.backend import bandwidth
from mlxlm.backend.bandwidth import BytesPerToken
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.output import print_status
from mlxlm.utils.formatting import human_bytes


def bytes_read_per_token(chat: Chat) -> BytesPerToken | str:
    """What a token of the last answer moved, or why that isn't known. To be asked before another answer."""
    result = chat.stats.last
    if result.speculation is not None and result.speculation.rounds:
        return "not stated where tokens are proposed, since one pass over the weights decides several"
    bytes_per_token = bandwidth.bytes_read_per_token(chat.lm.model, chat.caches, len(result.tokens))
    return bytes_per_token or "not stated for a mixture of experts, where each token reads other weights"


def memory_bandwidth() -> float:
    """Bytes per second of this machine's memory; measured now, which is said, unless that was done before."""
    if (cached_bandwidth := bandwidth.cached_bandwidth()) is not None:
        return cached_bandwidth
    print_status("measuring how fast this machine reads memory …")
    return bandwidth.measure_bandwidth()


def summary_line(chat: Chat, bytes_per_token: BytesPerToken | str) -> str:
    """One line about the last answer. The share of the bandwidth is there once that is known."""
    last = chat.stats.last
    timings = last.timings
    parts = [f"{len(last.tokens)} tokens", f"first after {timings.time_to_first_token:.2f} s"]
    if speed := timings.tokens_per_second:
        parts.append(f"{speed:.1f} tokens/s")
        if isinstance(bytes_per_token, BytesPerToken) and (limit := bandwidth.cached_bandwidth()):
            parts.append(f"{bytes_per_token.total * speed / limit:.0%} of memory bandwidth")
    return ", ".join(parts)


def report_lines(chat: Chat, bytes_per_token: BytesPerToken | str | None) -> list[str]:
    """Lines about the chat, the last answer, and the machine."""
    stats = chat.stats
    lines = [
        f"answers: {stats.answers}, {stats.generated_tokens} tokens; "
        f"context: {chat.context_used} of {chat.context_size} tokens; next seed {chat.options.seed}"
    ]
    if (last := stats.last) is None:
        return lines
    timings, read = last.timings, last.prompt_tokens - last.cached_tokens
    speed = f", {timings.tokens_per_second:.1f} tokens/s" if timings.tokens_per_second else ""
    lines.append(
        f"last answer: {len(last.tokens)} tokens{speed}; first token after {timings.time_to_first_token:.2f} s, "
        f"{read} tokens read and {last.cached_tokens} kept from before"
    )
    if (speculation := last.speculation) is not None:
        rate = "" if speculation.acceptance_rate is None else f", {speculation.acceptance_rate:.0%} accepted"
        why = f"; {speculation.reason}" if speculation.reason else ""
        lines.append(f"proposed: {speculation.proposed} tokens{rate}{why}")
    if bytes_per_token is not None and timings.tokens_per_second:
        lines += _limit(bytes_per_token, timings.tokens_per_second)
    peak = human_bytes(timings.peak_memory_bytes)
    return [*lines, f"memory: {human_bytes(stats.cache_bytes)} of cache, at most {peak} in all"]


def _limit(bytes_per_token: BytesPerToken | str, speed: float) -> list[str]:
    """How far from the limit that memory's bandwidth sets; what is counted is said."""
    if isinstance(bytes_per_token, str):
        return [f"bandwidth: {bytes_per_token}"]
    limit, used = memory_bandwidth(), bytes_per_token.total * speed
    parts = f"{human_bytes(bytes_per_token.weights)} of weights and {human_bytes(bytes_per_token.cache)} of cache"
    share = f"{human_bytes(used)}/s, {used / limit:.0%} of the {human_bytes(limit)}/s that this machine reads at"
    lines = [f"bandwidth: each token reads {parts}: {share}"]
    if used > limit:
        lines.append("  (more than memory gives: so small a model is read from the processor's own caches)")
    return lines
