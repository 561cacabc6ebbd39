"""Chats whose context is full."""

import pytest

from mlxlm import generate
from mlxlm.cache import KVOptions
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.history import ContextFullError, MessageTooLongError
from mlxlm.chat.messages import Message
from mlxlm.chat.session import Chat
from tests.chat.conversations import GREEDY, fresh, fresh_prompt, prompt_of, read, remade, say, small, wide


def test_a_full_context_is_an_error_and_the_chat_continues(lm):
    chat = Chat(small(lm), temperature=0, max_tokens=None)
    list(chat.ask("Hello!"))
    assert chat.stats.last.finish_reason == "context"
    before = list(chat.messages)
    with pytest.raises(ContextFullError, match=r"context has 60.*undo, reset"):
        chat.ask("How are you?")
    long = "Hello! " * 40
    tokens = len(prompt_of(lm, long))
    for asked in (chat, Chat(small(lm))):  # with turns that could be dropped, too
        with pytest.raises(MessageTooLongError, match=f"message takes {tokens} .* context has 60 .try: a shorter"):
            asked.ask(long)
    assert chat.messages == before
    chat.reset()
    assert chat.messages == [] and chat.context_used == 0
    assert say(chat, "Hello!") == before[1].content


def test_drop_makes_room_for_several_turns(lm):
    chat = Chat(small(lm, 200), system_prompt="Be brief.", context_overflow="drop", temperature=0, max_tokens=10)
    dropped, used = [], []
    for n in range(14):
        before = chat.dropped
        say(chat, f"Question {n}?")
        assert chat.stats.last.finish_reason == "length"  # never cut off by the context
        dropped.append(chat.dropped - before)
        used.append(chat.context_used)
    drops = [n for n, count in enumerate(dropped) if count]
    assert len(drops) >= 2 and all(count % 2 == 0 and count > 2 for count in dropped if count)
    assert min(b - a for a, b in zip(drops, drops[1:], strict=False)) >= 3
    assert max(used) <= 200 and all(used[n] <= 100 + 20 for n in drops)
    assert len(chat.messages) == 29 and chat.messages[0] == Message("system", "Be brief.")
    seen = ChatTemplate(lm.tokenizer).encode([chat.messages[0], *chat.messages[1 + chat.dropped : -1]])
    assert chat.messages[-1].content == generate(lm, seen, temperature=0, max_tokens=10).text
    system_prompt = ChatTemplate(lm.tokenizer).encode(chat.messages[:1], add_generation_prompt=False)
    chat.context_overflow = "stop"
    assert chat.drop_oldest("x" * 90) > 0
    say(chat, "x" * 90)
    assert chat.stats.last.cached_tokens >= len(system_prompt)
    chat.context_overflow, before = "drop", chat.dropped
    for act in (chat.ask, chat.drop_oldest):
        with pytest.raises(MessageTooLongError):
            act("x" * 200)
    assert chat.dropped == before < 30


def test_dropped_turns_come_back_when_no_other_is_left(lm):
    chat = Chat(small(lm, 100), **GREEDY)
    for question in ("Hello!", "Why?"):
        say(chat, question)
    assert chat.drop_oldest() == 0  # the last message fits when asked again
    chat.lm = small(lm, chat.stats.last.prompt_tokens)
    with pytest.raises(ContextFullError):
        chat.retry()
    assert chat.drop_oldest() == 2
    assert "".join(piece.text for piece in chat.retry()) == generate(lm, prompt_of(lm, "Why?"), **GREEDY).text
    chat.lm = small(lm, 100)
    assert chat.drop_oldest("x" * 40) == 2 and chat.context_used == 0
    assert len(chat.messages) == 4
    chat.undo()
    assert chat.dropped == 0 and chat.context_used > 0


@pytest.mark.parametrize("bits", [None, 8])
def test_a_rotating_cache_bounds_a_chat_and_never_overflows(lm, bits):
    kv = KVOptions(size=64, key_bits=bits, value_bits=bits)
    lm = small(lm, 128) if bits is None else wide(lm)
    chat = Chat(lm, system_prompt="Be brief.", kv=kv, **GREEDY)
    sizes = []
    for n in range(9):
        _, expected = fresh(chat, f"Question {n}?")
        assert say(chat, f"Question {n}?") == expected.text
        if n:
            assert chat.stats.last.cached_tokens > 0
        sizes.append(chat.stats.cache_bytes)
    assert max(sizes) <= 10 * chat.kv_bytes_for(64)
    assert chat.stats.last.prompt_tokens > 128
    assert (chat.context_used, chat.context_size, chat.dropped) == (64, 64, 0)
    assert chat.drop_oldest() == 0
    chat.undo()
    _, expected = fresh(chat, "And?")  # across what was dropped it is read again, and right
    assert say(chat, "And?") == expected.text
    assert chat.stats.cache_bytes <= 10 * chat.kv_bytes_for(64)
    cached = chat.stats.last.cached_tokens
    list(chat.retry())
    assert chat.messages[-1].content == expected.text and chat.stats.last.cached_tokens >= cached


@pytest.mark.parametrize("kv", [None, KVOptions(size=32)])
def test_caches_that_drop_tokens_return_to_the_last_question(lm, kv):
    """An answer longer than what they can be trimmed by is taken back without the conversation being read again."""
    lm = lm if kv else remade(lm, sliding_window=32, model_type="mistral")
    long = {"temperature": 0, "max_tokens": 40}
    chat = Chat(lm, system_prompt="Be brief. " * 12, kv=kv, **long)

    def expected():
        return generate(lm, fresh_prompt(chat), kv=kv, **long).text

    for n in range(2):
        say(chat, f"Question {n}?")
    assert chat.messages[-1].content == expected()
    new = len(lm.tokenizer.encode("Question 2?")) + 70
    assert chat.stats.last.prompt_tokens > 2 * new
    list(chat.retry())
    assert read(chat) < new and chat.messages[-1].content == expected()
    list(chat.edit("What?"))
    assert read(chat) < new
    chat.undo()
    say(chat, "Why?")
    assert read(chat) < new and chat.messages[-1].content == expected()
    chat.undo()
    chat.undo()  # further back more is read again
    say(chat, "Why?")
    assert chat.messages[-1].content == expected()
