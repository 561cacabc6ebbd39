"""What tests of chats share."""

from dataclasses import replace

from mlx.utils import tree_flatten

from mlxlm import generate
from mlxlm.backend.mlx import mx
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.messages import Message
from mlxlm.model import Decoder

GREEDY = {"temperature": 0, "max_tokens": 12}


def say(chat, text):
    return "".join(piece.text for piece in chat.ask(text))


def read(chat):
    """How many tokens of the last prompt had to be read."""
    return chat.stats.last.prompt_tokens - chat.stats.last.cached_tokens


def fresh(chat, question):
    """The prompt of a question, and what a model that has read nothing yet answers to it."""
    prompt = ChatTemplate(chat.lm.tokenizer).encode([*chat.messages, Message("user", question)])
    return prompt, generate(chat.lm, prompt, kv=chat.kv, **GREEDY)


def prompt_of(lm, question):
    return ChatTemplate(lm.tokenizer).encode([Message("user", question)])


def small(lm, size=60, **changes):
    return replace(lm, config=lm.config.with_changes(max_position_embeddings=size, **changes))


def wide(lm):
    """A model whose head dim can be quantized."""
    config = lm.config.with_changes(head_dim=32, max_position_embeddings=128)
    decoder = Decoder(config)
    decoder.init_weights(seed=3)
    decoder.lm_head.weight = decoder.lm_head.weight * 20 * (mx.arange(300) >= 7)[:, None]
    return replace(lm, model=decoder, config=config)


def remade(lm, **changes):
    """The same weights in a model of another configuration."""
    config = lm.config.with_changes(**changes)
    decoder = Decoder(config)
    decoder.load_weights(tree_flatten(lm.model.parameters()))
    return replace(lm, model=decoder, config=config)


def fresh_prompt(chat):
    """The prompt that the last answer followed."""
    return ChatTemplate(chat.lm.tokenizer).encode(chat.messages[:-1])
