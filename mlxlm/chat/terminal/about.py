"""What a chat tells about its model, its answers, and how close they come to the machine's memory bandwidth."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlxlm.backend import bandwidth
from mlxlm.backend.bandwidth import BytesPerToken
from mlxlm.chat.chat_template import PLAIN
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.output import print_status
from mlxlm.config import ModelConfig
from mlxlm.generation import GenerationResult, LoadedModel
from mlxlm.utils.formatting import human_bytes, human_count

_PART_OF_RUN = re.compile(r"\d+bit|step-\d+")


def first_screen(chat: Chat) -> list[str]:
    """Return a few lines about a chat and its model.

    The speed is what the memory bandwidth allows, which is measured if that was not done before.
    """
    size = f"{human_bytes(chat.lm.weight_bytes)} of memory, a context of {chat.context_size:,} tokens"
    if isinstance(chat.lm.config, ModelConfig):  # mlx_lm's don't count their parameters
        config = chat.lm.config
        active = "" if config.num_experts is None else f" ({human_count(config.active_parameter_count())} active)"
        size = f"{human_count(config.parameter_count())} parameters{active}, {size}"
    lines = [model_name(chat.lm), size]
    weights = bandwidth.weight_bytes(chat.lm.model)
    if weights is not None and weights >= bandwidth.MIN_MODEL_BYTES:
        limit = float(f"{memory_bandwidth() / weights:.2g}")
        lines.append(f"Estimate: at most {limit:g} tokens/s on this machine")
    if messages := sum(message.role != "system" for message in chat.messages):
        lines.append(f"Continuing after {messages} messages; /show messages shows them all.")
    if chat.chat_template == PLAIN:
        length = f" by at most {chat.options.max_tokens} tokens (--max-tokens)" if chat.options.max_tokens else ""
        lines.append(f"This model has no chat template: it continues your text{length}.")
    lines.append("The percentage in the prompt shows how full the context is.")
    return [*lines, "/help lists the commands, Ctrl-D leaves."]


def example_prompt(chat: Chat) -> str:
    """Return the model's own example of a message, or a common one."""
    own = chat.lm.generation_config.example_prompt
    return own or ("Once upon a time" if chat.chat_template == PLAIN else "Why is the sky blue?")


def model_name(lm: LoadedModel) -> str:
    """Return a hub id, or the last part of a path."""
    path = Path(lm.path)
    if not os.path.exists(path):
        return str(path)
    parent = f"{path.parent.name}/" if _PART_OF_RUN.fullmatch(path.name) else ""
    return parent + path.name.removesuffix(".gguf")


def bytes_read_per_token(chat: Chat, result: GenerationResult) -> BytesPerToken | str:
    """Return the bytes that each token of the last answer, `result`, read, or why that is unknown."""
    if result.speculation is not None and result.speculation.rounds:
        return "unknown with speculative decoding, where one pass over the weights verifies several tokens"
    weights = bandwidth.weight_bytes(chat.lm.model)
    if weights is None:
        return "unknown for a mixture of experts, where each token reads different weights"
    return BytesPerToken(weights, chat.kv_bytes_for(result.prompt_tokens + len(result.tokens) // 2))


def memory_bandwidth() -> float:
    """Return the memory bandwidth in bytes per second. Measure it, with a message, if that was not done before."""
    if (cached_bandwidth := bandwidth.cached_bandwidth()) is not None:
        return cached_bandwidth
    print_status("measuring memory bandwidth …")
    return bandwidth.measure_bandwidth()


def summary_line(result: GenerationResult, bytes_per_token: BytesPerToken | str) -> str:
    """Return one line about an answer, with its share of the memory bandwidth if that is known."""
    timings = result.timings
    parts = [f"{len(result.tokens)} tokens", f"first after {timings.time_to_first_token:.2f} s"]
    if speed := timings.tokens_per_second:
        parts.append(f"{speed:.1f} tokens/s")
        if isinstance(bytes_per_token, BytesPerToken) and (limit := bandwidth.bandwidth_for(bytes_per_token, speed)):
            parts.append(f"{bytes_per_token.total * speed / limit:.0%} of memory bandwidth")
    return ", ".join(parts)


def report_lines(chat: Chat, bytes_per_token: BytesPerToken | str) -> list[str]:
    """Return lines about the chat, the last answer and the machine."""
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
        f"{read} tokens read and {last.cached_tokens} from the cache"
    )
    if (speculation := last.speculation) is not None:
        rate = "" if speculation.acceptance_rate is None else f", {speculation.acceptance_rate:.0%} accepted"
        reason = f"; {speculation.reason}" if speculation.reason else ""
        lines.append(f"speculative decoding: {speculation.proposed} tokens proposed{rate}{reason}")
    if bytes_per_token and timings.tokens_per_second:
        lines += _bandwidth_lines(bytes_per_token, timings.tokens_per_second)
    peak = human_bytes(timings.peak_memory_bytes)
    return [*lines, f"memory: {human_bytes(stats.cache_bytes)} of key-value cache; {peak} of MLX's arrays at the peak"]


def _bandwidth_lines(bytes_per_token: BytesPerToken | str, speed: float) -> list[str]:
    """Compare the speed with the limit that memory bandwidth sets."""
    if isinstance(bytes_per_token, str):
        return [f"bandwidth: {bytes_per_token}"]
    limit = bandwidth.bandwidth_for(bytes_per_token, speed) or memory_bandwidth()
    used = bytes_per_token.total * speed
    parts = f"{human_bytes(bytes_per_token.weights)} of weights and {human_bytes(bytes_per_token.cache)} of cache"
    share = f"{human_bytes(used)}/s, {used / limit:.0%} of this machine's {human_bytes(limit)}/s"
    lines = [f"bandwidth: each token reads {parts}: {share}"]
    if used > limit:
        lines.append("  (more than the memory bandwidth: a model this small is read from the processor's caches)")
    return lines
