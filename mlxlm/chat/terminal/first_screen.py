"""What a terminal shows before the first message: the model, what it can do, and an example to send."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlxlm.backend import bandwidth
from mlxlm.chat.chat_template import PLAIN
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.statistics import memory_bandwidth
from mlxlm.config import ModelConfig
from mlxlm.generation import LoadedModel
from mlxlm.utils.formatting import human_bytes, human_count

_PART_OF_RUN = re.compile(r"\d+bit|step-\d+")


def first_screen(chat: Chat) -> list[str]:
    """Return a few lines about a chat and its model.

    The speed is what the memory bandwidth allows, which is measured if that was not done before.
    """
    lines = [model_name(chat.lm), f"{_size(chat.lm)}, a context of {chat.context_size:,} tokens"]
    weights = bandwidth.weight_bytes(chat.lm.model)
    if weights is not None and weights >= bandwidth.MIN_MODEL_BYTES:
        limit = float(f"{memory_bandwidth() / weights:.2g}")
        lines.append(f"Estimate: at most {limit:g} tokens/s on this machine")
    if messages := sum(message.role != "system" for message in chat.messages):
        lines.append(f"Continuing after {messages} messages; /show messages shows them.")
    if chat.chat_template == PLAIN:
        until = "it ends the text itself"
        if chat.options.max_tokens:
            until += f", or for {chat.options.max_tokens} tokens (--max-tokens)"
        lines.append(f"This model has no chat template: it continues your text until {until}.")
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


def _size(lm: LoadedModel) -> str:
    if not isinstance(lm.config, ModelConfig):  # mlx_lm's don't count their parameters
        return f"{human_bytes(lm.weight_bytes)} of memory"
    return f"{human_count(lm.config.parameter_count())} parameters, {human_bytes(lm.weight_bytes)} of memory"
