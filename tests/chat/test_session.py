"""Sessions: only new tokens are read, answers equal those of a fresh computation, nothing breaks a session."""

from contextlib import closing
from dataclasses import replace

import pytest
from mlx.utils import tree_flatten

from mlxlm.chat.session import ChatSession
from mlxlm.chat.template import ChatTemplate, Message
from mlxlm.errors import GenerationError
from mlxlm.generation import GenerationOptions, generate
from mlxlm.model import Decoder

GREEDY = GenerationOptions(temperature=0, max_tokens=12)


class Recording:
    """A model that notes the ids of each call."""

    def __init__(self, model):
        self._model, self.layers, self.calls = model, model.layers, []

    def __call__(self, ids, cache=None):
        self.calls.append(ids.shape[1])
        return self._model(ids, cache=cache)


def say(session, text):
    return "".join(chunk.text for chunk in session.ask(text))


def test_answers_equal_a_fresh_computation_of_the_whole_conversation(loaded):
    session = ChatSession(loaded, "Be brief.", GREEDY)
    template = ChatTemplate(loaded.tokenizer)
    for question in ("Hello!", "How are you?", "Grüße 世界"):
        prompt = template.encode([*session.messages, Message("user", question)])
        assert say(session, question) == generate(loaded, prompt, temperature=0, max_tokens=12).text


def test_only_new_tokens_are_read_and_the_system_prompt_once(loaded):
    model = Recording(loaded.model)
    session = ChatSession(replace(loaded, model=model), "You are a quick brown fox.", GREEDY)
    say(session, "Hello!")
    held = session.stats.context_used
    model.calls.clear()
    say(session, "How are you?")
    last = session.stats.last
    assert last.cached_tokens == held
    assert sum(model.calls) == last.prompt_tokens - held + len(last.tokens) - 1
    # What was read: the last token of the answer, its end, the new message and the model's turn.
    new = loaded.tokenizer.encode(
        "<|end|>\n<|user|>\nHow are you?<|end|>\n<|assistant|>\n", add_special_tokens=False, parse_special=True
    )
    assert last.prompt_tokens - held == 1 + len(new)
    template = ChatTemplate(loaded.tokenizer)
    assert template.encode(session.messages).count(loaded.tokenizer.special_tokens["<|system|>"]) == 1


def test_a_stopped_answer_stays_as_far_as_it_was_said(loaded):
    session = ChatSession(loaded, None, GREEDY)
    with closing(session.ask("Hello!")) as chunks:
        said = "".join(next(chunks).text for _ in range(5))
    assert session.messages[0] == Message("user", "Hello!")
    assert session.messages[1].content == said
    prompt = ChatTemplate(loaded.tokenizer).encode([*session.messages, Message("user", "And?")])
    assert say(session, "And?") == generate(loaded, prompt, temperature=0, max_tokens=12).text
    assert session.stats.last.cached_tokens > 0


def test_stopped_while_reading_the_message_is_forgotten(loaded):
    session = ChatSession(loaded, None, GREEDY)

    def stop(_read):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(session.ask("Hello! " * 300, on_prefill=stop))
    assert session.messages == [] and session.stats.context_used > 0
    prompt = ChatTemplate(loaded.tokenizer).encode([Message("user", "And?")])
    assert say(session, "And?") == generate(loaded, prompt, temperature=0, max_tokens=12).text


def test_a_full_context_says_so_and_the_session_goes_on(loaded):
    small = replace(loaded, config=loaded.config.with_changes(max_position_embeddings=60))
    session = ChatSession(small, None, replace(GREEDY, max_tokens=None))
    list(session.ask("Hello!"))
    assert session.stats.last.finish_reason == "context"
    before = list(session.messages)
    with pytest.raises(GenerationError, match=r"context has 60.*/reset"):
        session.ask("How are you?")
    assert session.messages == before
    session.reset()
    assert session.messages == [] and session.stats.context_used == 0
    assert say(session, "Hello!") == before[1].content


def test_reset_keeps_the_system_prompt(loaded):
    session = ChatSession(loaded, "Be brief.", GREEDY)
    first = say(session, "Hello!")
    say(session, "Why?")
    session.reset()
    assert session.messages == [Message("system", "Be brief.")]
    assert say(session, "Hello!") == first


def test_equal_seeds_give_equal_conversations(loaded):
    def conversation(seed):
        session = ChatSession(loaded, None, GenerationOptions(temperature=1.0, max_tokens=10, seed=seed))
        return [say(session, "Hello!"), say(session, "Hello!")]

    assert conversation(5) == conversation(5)
    assert conversation(5) != conversation(6)


def test_the_end_of_a_turn_is_not_part_of_the_answer(loaded):
    end = loaded.tokenizer.special_tokens["<|end|>"]
    model = loaded.model

    class Ending(Recording):
        def __call__(self, ids, cache=None):
            logits = super().__call__(ids, cache)
            logits[..., end] = 1e3 if len(self.calls) > 6 else -1e3
            return logits

    session = ChatSession(replace(loaded, model=Ending(model)), None, GREEDY)
    say(session, "Hello!")
    last = session.stats.last
    assert last.finish_reason == "eos" and last.tokens[-1] == end
    assert session.messages[-1].ids == tuple(last.tokens[:-1])
    held = session.stats.context_used
    list(session.ask("Why?"))
    assert session.stats.last.cached_tokens == held  # the end of the turn was in the cache already


def test_an_empty_message(loaded):
    with pytest.raises(GenerationError, match="message is empty"):
        ChatSession(loaded).ask("")


def test_a_chat_that_crosses_the_length_where_positions_change(loaded):
    """It is read again once, with the positions of a long text, and goes on; a new chat has the short ones."""
    scaling = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = loaded.config.with_changes(rope_scaling={**scaling, "original_max_position_embeddings": 60})
    decoder = Decoder(config)
    decoder.load_weights(tree_flatten(loaded.model.parameters()))
    loaded = replace(loaded, model=decoder, config=config)
    session, template = ChatSession(loaded, None, GREEDY), ChatTemplate(loaded.tokenizer)
    read = []
    for question in ("Hello!", "How?", "You?", "Dog?"):
        prompt = template.encode([*session.messages, Message("user", question)])
        assert say(session, question) == generate(loaded, prompt, temperature=0, max_tokens=12).text
        read.append((session.stats.last.prompt_tokens + 12 > 60, session.stats.last.cached_tokens > 0))
    assert read == [(False, False), (False, True), (True, False), (True, True)]
    session.reset()
    say(session, "Hello!")
    assert session.stats.last.cached_tokens == 0 and session.stats.context_used <= 60
