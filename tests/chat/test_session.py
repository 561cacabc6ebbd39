"""Chats: only new tokens are read, answers equal those of a fresh computation, nothing breaks a conversation."""

from contextlib import closing
from dataclasses import replace
from threading import Event, Thread

import pytest
from mlx.utils import tree_flatten

import mlxlm
from mlxlm import generate, tokenizer
from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, make_cache
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.history import ContextFullError, MessageTooLongError
from mlxlm.chat.messages import Message
from mlxlm.chat.session import Chat
from mlxlm.generation import GenerationConfig
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError, TokenizerError
from tests.generation.recording_model import TIMEOUT

GREEDY = {"temperature": 0, "max_tokens": 12}


class Recording:
    """A model that notes how many tokens each call reads."""

    def __init__(self, model):
        self._model, self.calls = model, []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, ids, cache=None):
        self.calls.append(ids.shape[1])
        return self._model(ids, cache=cache)


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


def test_answers_equal_a_fresh_computation_of_the_whole_conversation(lm):
    chat = mlxlm.Chat(lm, system_prompt="Be brief.", **GREEDY)
    for question in ("Hello!", "How are you?", "Grüße 世界"):
        _, expected = fresh(chat, question)
        assert say(chat, question) == expected.text


def test_only_new_tokens_are_read_and_the_system_prompt_once(lm):
    model = Recording(lm.model)
    chat = Chat(replace(lm, model=model), system_prompt="You are a quick brown fox.", **GREEDY)
    say(chat, "Hello!")
    first = chat.stats.last
    assert first.cached_tokens == 0
    model.calls.clear()
    say(chat, "How are you?")
    last = chat.stats.last
    # The last token of the answer was never read, nor its end, the new message and the model's turn.
    new = lm.tokenizer.encode(
        "<|end|>\n<|user|>\nHow are you?<|end|>\n<|assistant|>\n", add_special_tokens=False, parse_special=True
    )
    assert read(chat) == 1 + len(new)
    assert last.cached_tokens == first.prompt_tokens + len(first.tokens) - 1
    assert sum(model.calls) == 1 + len(new) + len(last.tokens) - 1
    prompt, _ = fresh(chat, "?")
    assert prompt.count(lm.tokenizer.special_tokens["<|system|>"]) == 1
    chat.reset()
    say(chat, "How are you?")
    shared = ChatTemplate(lm.tokenizer).encode(chat.messages[:1], add_generation_prompt=False)
    assert chat.stats.last.cached_tokens >= len(shared)  # nor is it read again after a reset


def test_a_message_that_is_stopped_during_prefill_is_forgotten(lm):
    chat = Chat(lm, **GREEDY)

    def stop(_read):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(chat.ask("Hello! " * 300, on_prefill=stop))
    assert chat.messages == [] and chat.stats.answers == 0
    _, expected = fresh(chat, "And?")
    assert say(chat, "And?") == expected.text


def test_any_call_ends_the_current_answer(lm):
    chat = Chat(lm, **GREEDY)
    left = chat.ask("Hello!")
    said = next(left).text + next(left).text
    answer = say(chat, "And?")
    assert answer == generate(lm, fresh_prompt(chat), **GREEDY).text and chat.stats.last.cached_tokens > 0
    assert [m.content for m in chat.messages] == ["Hello!", said, "And?", answer]
    left = chat.ask("Why?")
    next(left)
    assert chat.undo().question == "Why?" and list(left) == []
    never_begun = chat.ask("Why?")
    chat.undo()
    assert list(never_begun) == [] and len(chat.messages) == 2


def test_undo_reads_nothing_again(lm):
    chat = Chat(lm, **GREEDY)
    say(chat, "Hello!")
    say(chat, "How are you?")
    answer = chat.messages[-1].content
    turn = chat.undo()
    assert (turn.question, turn.answer, turn.finish_reason) == ("How are you?", answer, "length")
    say(chat, "How old are you?")
    assert read(chat) <= len(lm.tokenizer.encode("How old are you?")) + 4 < chat.stats.last.prompt_tokens / 2
    chat.undo()
    chat.undo()
    assert chat.messages == []
    with pytest.raises(GenerationError, match="there is no message yet"):
        chat.undo()


def test_retry_uses_the_next_seed_and_reads_one_token(lm):
    chat = Chat(lm, temperature=1.0, max_tokens=10, seed=5)
    say(chat, "Hello!")
    first = say(chat, "Why?")
    second = "".join(piece.text for piece in chat.retry())
    assert first != second and read(chat) == 1
    assert [m.content for m in chat.messages][2:] == ["Why?", second] and chat.branches == {"main": 2}
    assert chat.stats.last.seed == 7  # one after the other, whatever was undone
    plain = generate(lm, fresh_prompt(chat), temperature=1.0, max_tokens=10, seed=7)
    assert plain.text == second
    with closing(chat.retry()):
        pass
    with closing(chat.edit("No?")) as pieces:
        del pieces
    assert chat.messages[-1].content == second  # stopped before the first token: as it was


def fresh_prompt(chat):
    """The prompt that the last answer followed."""
    return ChatTemplate(chat.lm.tokenizer).encode(chat.messages[:-1])


def test_edit_reads_only_what_was_changed(lm):
    chat = Chat(lm, system_prompt="Be brief.", **GREEDY)
    say(chat, "Hello!")
    say(chat, "How are you today?")
    list(chat.edit("How are you tomorrow?"))
    assert [m.content for m in chat.messages if m.role == "user"] == ["Hello!", "How are you tomorrow?"]
    ends = lm.tokenizer.encode("tomorrow?<|end|>\n<|assistant|>\n", add_special_tokens=False, parse_special=True)
    assert read(chat) <= len(ends) + 1
    assert chat.messages[-1].content == generate(lm, fresh_prompt(chat), **GREEDY).text
    for nothing in (Chat(lm).retry, lambda: Chat(lm).edit("x")):
        with pytest.raises(GenerationError, match="there is no message yet"):
            nothing()


def test_branches_read_only_what_they_do_not_share(lm):
    chat = Chat(lm, **GREEDY)
    say(chat, "Hello! " * 10)
    chat.branch("second")
    assert chat.branch_name == "second"
    say(chat, "How are you?")
    common = chat.stats.last.cached_tokens
    two = chat.messages
    chat.switch("main")
    assert chat.messages == two[:2]
    say(chat, "Why?")
    assert chat.stats.last.cached_tokens >= common
    chat.switch("second")
    assert chat.messages == two
    say(chat, "And?")
    assert chat.stats.last.cached_tokens >= common
    chat.switch("main")
    chat.switch("second")
    say(chat, "And?")
    assert read(chat) <= 14
    assert chat.branches == {"main": 2, "second": 4}
    chat.branch("other")
    assert chat.branches["other"] == 4


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda chat: chat.branch("main"), "branch main already exists"),
        (lambda chat: chat.branch("a b"), "is not a valid branch name"),
        (lambda chat: chat.branch(""), "is not a valid branch name"),
        (lambda chat: chat.switch("x"), "no branch x .try: one of main, second"),
        (lambda chat: chat.ask(""), "message is empty"),
        (lambda chat: Chat(chat.lm, context_overflow="ask"), "context_overflow is 'ask' .try: stop or drop"),
        (lambda chat: Chat(chat.lm, temprature=1), "no option temprature"),
        (lambda chat: Chat(chat.lm, kv=KVOptions(size=5000)), "more than the model's context"),
    ],
)
def test_invalid_calls(lm, act, message):
    chat = Chat(lm)
    chat.branch("second")
    with pytest.raises(GenerationError, match=message):
        act(chat)
    with pytest.raises(TokenizerError, match="surrogate"):
        chat.system_prompt = "\ud800"


def test_the_number_of_branches_is_limited(lm):
    chat = Chat(lm)
    for n in range(99):
        chat.branch(f"branch-{n}")
    with pytest.raises(GenerationError, match="100 branches"):
        chat.branch("one-more")
    assert len(chat.branches) == 100


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


def test_reset_keeps_the_system_prompt(lm):
    chat = Chat(lm, system_prompt="Be brief.", **GREEDY)
    first = say(chat, "Hello!")
    chat.branch("two")
    say(chat, "Why?")
    chat.reset()
    assert chat.messages == [Message("system", "Be brief.")] and chat.branches == {"main": 0}
    assert say(chat, "Hello!") == first
    chat.system_prompt = "Be long."
    assert chat.messages[0] == Message("system", "Be long.")
    _, expected = fresh(chat, "Why?")
    assert say(chat, "Why?") == expected.text
    chat.system_prompt = None
    assert chat.messages[0].role == "user"


def test_options_can_be_changed_and_a_new_seed_begins_anew(lm):
    chat = Chat(lm, temperature=1.0, max_tokens=10, seed=5)
    first = say(chat, "Hello!")
    chat.options = replace(chat.options, max_tokens=4)
    say(chat, "Hello!")
    assert (chat.stats.last.seed, len(chat.stats.last.tokens)) == (6, 4)
    for seed in (8, 5, 5):  # also the same one again
        chat.reset()
        chat.options = replace(chat.options, seed=seed, max_tokens=10)
        assert (say(chat, "Hello!") == first) is (seed == 5)
        assert (chat.stats.last.seed, chat.options.seed) == (seed, seed + 1)
    for _ in chat.ask("Hello!"):
        chat.options = replace(chat.options, seed=100)
    assert chat.options.seed == 100  # set during an answer
    assert Chat(lm).options.seed is not None
    chat.options = replace(chat.options, seed=None)
    assert chat.options.seed not in (None, 6)  # a drawn one


def test_the_end_of_a_turn_is_not_part_of_the_answer(lm):
    end = lm.tokenizer.special_tokens["<|end|>"]

    class Ending(Recording):
        def __call__(self, ids, cache=None):
            logits = super().__call__(ids, cache)
            logits[..., end] = 1e3 if len(self.calls) > 6 else -1e3
            return logits

    chat = Chat(replace(lm, model=Ending(lm.model)), **GREEDY)
    say(chat, "Hello!")
    last = chat.stats.last
    assert last.finish_reason == "eos" and last.tokens[-1] == end
    assert chat.messages[-1].ids == tuple(last.tokens[:-1])
    list(chat.ask("Why?"))
    # All of the answer was in the cache already, but for the token that ended it.
    assert chat.stats.last.cached_tokens >= last.prompt_tokens + len(last.tokens) - 1


class Scripted(Recording):
    """A model that answers everything with `script`, and has the caches that it would have."""

    def make_cache(self):
        return make_cache(self._model)

    def __init__(self, lm, script, generation_prefix=""):
        super().__init__(lm.model)

        def encode(text):
            return lm.tokenizer.encode(text, add_special_tokens=False, parse_special=True)

        self.script, self.begins, self.text = (
            encode(script + "<|end|>"),
            encode("<|assistant|>\n" + generation_prefix),
            [],
        )

    def __call__(self, ids, cache=None):
        self.text[cache[0].offset :] = ids[0].tolist()
        logits = super().__call__(ids, cache)
        prompt_ends = range(len(self.text), len(self.begins) - 1, -1)
        end = next((n for n in prompt_ends if self.text[n - len(self.begins) : n] == self.begins), None)
        if end is not None and (said := len(self.text) - end) < len(self.script):
            logits[0, -1, self.script[said]] = 1e4
        return logits


THOUGHT = "<think>\nHm, a fox.\n</think>\n\nThe fox."


def test_reasoning_is_separated_from_the_answer(lm):
    chat = Chat(replace(lm, model=Scripted(lm, THOUGHT)), temperature=0, max_tokens=None)
    pieces = list(chat.ask("Hello!"))
    assert "".join(piece.text for piece in pieces if piece.reasoning) == "Hm, a fox."
    assert "".join(piece.text for piece in pieces if not piece.reasoning) == "The fox."
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["eos"] and pieces[-1].finish_reason
    assert len(pieces) >= len(chat.stats.last.tokens)
    assert chat.messages[-1].content == THOUGHT
    say(chat, "Why?")
    assert read(chat) <= 12  # this template keeps it: nothing is read again


def without_reasoning(template):
    """The template, dropping the reasoning of earlier answers."""
    return template.replace(
        "{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
    )


def test_a_template_that_drops_earlier_reasoning(lm, tokens):
    original = tokens.chat_template
    tokens.chat_template = without_reasoning(original)
    assert tokens.chat_template != original
    model = Scripted(lm, THOUGHT)
    chat = Chat(replace(lm, model=model), temperature=0, max_tokens=None)
    prompts, template = [], ChatTemplate(tokens)
    for question in ("Hello!", "Why?", "How?"):
        prompts.append(template.encode([*chat.messages, Message("user", question)]))
        say(chat, question)
        last = chat.stats.last
        assert last.prompt_tokens == len(prompts[-1])
        assert "Hm" not in tokens.decode(prompts[-1])
        # All before the last answer is held, as it was in the prompt before.
        assert last.cached_tokens == (len(prompts[-2]) if len(prompts) > 1 else 0)
    assert [m.content for m in chat.messages if m.role == "assistant"] == [THOUGHT] * 3
    list(chat.retry())
    assert read(chat) == 1


def test_a_template_that_opens_the_block_itself(lm, tokens):
    tokens.chat_template = tokens.chat_template.replace("assistant|>\n{% endif", "assistant|>\n<think>\n{% endif")
    model = Scripted(lm, THOUGHT.removeprefix("<think>\n"), generation_prefix="<think>\n")
    chat = Chat(replace(lm, model=model), temperature=0, max_tokens=None)
    pieces = list(chat.ask("Hello!"))
    assert "".join(piece.text for piece in pieces if piece.reasoning) == "Hm, a fox."
    assert chat.messages[-1].content == THOUGHT  # with the tag, as the model has read it
    say(chat, "Why?")
    new = "<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n<think>\n"
    assert read(chat) <= len(tokens.encode(new, add_special_tokens=False, parse_special=True))
    assert chat.messages[-1].content == THOUGHT


def test_a_chat_with_another_model_continues_as_text(lm, tokens):
    chat = Chat(lm, logit_bias={7: -100}, **GREEDY)
    say(chat, "Hello!")
    other = remade(lm)
    other.model.init_weights(seed=9)
    mx.eval(other.model.parameters())
    said = chat.messages[-1]
    chat.lm = other
    assert chat.messages[-1] == said and chat.options.logit_bias  # the same tokens
    chat.options = replace(chat.options, logit_bias={})
    _, expected = fresh(chat, "Why?")
    assert say(chat, "Why?") == expected.text and chat.stats.last.cached_tokens == 0
    chat.options = replace(chat.options, logit_bias={7: -100})
    with_other_tokens = tokenizer.train(["Another text altogether, of other words. " * 20], 280)
    with_other_tokens.chat_template = tokens.chat_template
    chat.lm = replace(other, tokenizer=with_other_tokens)
    assert not chat.options.logit_bias and chat.messages[-1].content == expected.text
    assert not any(message.ids for message in chat.messages)
    _, expected = fresh(chat, "Why?")
    assert say(chat, "Why?") == expected.text
    with pytest.raises(GenerationError, match="more than the model's context"):
        rotating = Chat(lm, kv=KVOptions(size=1000), **GREEDY)
        rotating.lm = small(other)
    assert rotating.lm is lm and say(rotating, "Hello!")


def test_a_model_sets_the_defaults_of_its_options(lm):
    chat = Chat(replace(lm, generation_config=GenerationConfig({"temperature": 0.2, "top_k": 5})), top_k=9)
    assert (chat.defaults.temperature, chat.options.temperature, chat.options.top_k) == (0.2, 0.2, 9)
    chat.lm = replace(remade(lm), generation_config=GenerationConfig({"temperature": 0.4, "top_k": 3}))
    assert (chat.options.temperature, chat.options.top_k) == (0.4, 9)


def test_speculation_changes_no_text(lm):
    def conversation(speculation):
        chat = Chat(lm, speculation=speculation, temperature=0, max_tokens=40)
        return [say(chat, "The quick brown fox. " * 5), say(chat, "The quick brown fox?")], chat.stats.last

    speculative, last = conversation(SpeculativeDecoder(PromptLookup()))
    plain, without = conversation(None)
    assert speculative == plain and last.speculation is not None and without.speculation is None
    assert last.cached_tokens == without.cached_tokens


def test_token_counts_are_those_of_each_message(lm):
    chat = Chat(lm, system_prompt="Be brief.", **GREEDY)
    assert chat.token_counts() == [len(lm.tokenizer.encode("Be brief.", add_special_tokens=False))]
    assert chat.context_used == 0
    say(chat, "Hello!")
    counts = chat.token_counts()
    assert counts[1:] == [len(lm.tokenizer.encode("Hello!", add_special_tokens=False)), 12]
    assert sum(counts) < chat.context_used == chat.stats.last.prompt_tokens + 12 + 2


def messages_of(*texts):
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, texts, strict=False)]


def test_a_chat_begins_with_a_conversation(lm):
    first = Chat(lm, system_prompt="Be brief.", **GREEDY)
    say(first, "Hello!")
    for messages in (first.messages, [{"role": m.role, "content": m.content} for m in first.messages]):
        chat = Chat(lm, messages=messages, **GREEDY)
        assert [(m.role, m.content) for m in chat.messages] == [(m.role, m.content) for m in first.messages]
        assert chat.system_prompt == "Be brief." and chat.branches == {"main": 1}
        _, expected = fresh(chat, "And?")
        assert say(chat, "And?") == expected.text
    chat.undo()
    assert chat.undo().question == "Hello!" and len(chat.messages) == 1
    assert Chat(lm, messages=[], system_prompt="Be brief.").messages == [Message("system", "Be brief.")]
    assert Chat(lm, messages=[Message("system", "Be brief.")]).messages == [Message("system", "Be brief.")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"messages": messages_of("Hello!")}, "the last message has no answer"),
        ({"messages": messages_of("a", "b")[::-1]}, "role 'assistant' where a text of the user was expected: 'b'"),
        ({"messages": messages_of("a") * 2}, "role 'user' where a text of the assistant was expected"),
        ({"messages": [*messages_of("a", "b"), Message("system", "c")]}, "role 'system' where"),
        ({"messages": [Message("system", "c")], "system_prompt": "d"}, "two system prompts"),
        ({"messages": "Hello!"}, "not a list of messages"),
        ({"messages": [{"role": "user", "content": 1}]}, "content of message 1 is not a string"),
    ],
)
def test_a_chat_does_not_begin_with_anything_else(lm, arguments, message):
    with pytest.raises(GenerationError, match=message):
        Chat(lm, **arguments)
    with pytest.raises(TokenizerError, match="surrogate"):
        Chat(lm, messages=messages_of("a", "\ud800"))


CHANGES = [
    lambda chat: chat.reset(),
    lambda chat: chat.undo(),
    lambda chat: (chat.branch("b"), chat.switch("main"), chat.reset()),
    lambda chat: (chat.ask("?").close(), chat.reset()),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("round_", range(5))  # at other moments
def test_another_thread_ends_an_answer(lm, change, round_):
    chat, errors, begun, ended = Chat(lm, temperature=1.0, max_tokens=3000), [], Event(), Event()

    def iterate():
        try:
            for number, _ in enumerate(chat.ask("Hello!")):
                if number == 2 * round_:
                    begun.set()
        except BaseException as error:
            errors.append(error)
        ended.set()

    thread = Thread(target=iterate)
    thread.start()
    assert begun.wait(TIMEOUT)
    change(chat)
    assert ended.wait(TIMEOUT) and errors == []
    assert chat.messages == [] and 1 <= chat.stats.generated_tokens < 3000
    thread.join()


def test_an_answer_is_ended_before_its_first_token(lm):
    """Another thread reads a long prompt: the message is forgotten."""
    chat, reading, errors = Chat(lm, **GREEDY), Event(), []

    def iterate():
        try:
            errors.extend(chat.ask("Hello! " * 100, on_prefill=lambda _: reading.set()))
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=iterate)
    thread.start()
    assert reading.wait(TIMEOUT)
    chat.reset()
    thread.join(TIMEOUT)
    assert not thread.is_alive() and chat.messages == []
    assert not any(isinstance(error, BaseException) for error in errors)


def test_a_chat_is_changed_between_two_chunks(lm):
    chat, said = Chat(lm, **GREEDY), []
    for chunk in chat.ask("Hello!"):
        said.append(chunk.text)
        if len(said) == 3:
            chat.reset()
    assert len(said) == 3 and chat.messages == []
    assert say(chat, "Hello!").startswith("".join(said))


def test_a_chat_is_not_changed_from_within_a_callback(lm):
    chat, errors = Chat(lm, **GREEDY), []

    def reset(_):
        with pytest.raises(GenerationError, match="from within its answer") as caught:
            chat.reset()
        errors.append(caught)

    answer = "".join(chunk.text for chunk in chat.ask("Hello!", on_prefill=reset))
    assert errors and answer == chat.messages[-1].content and len(chat.stats.last.tokens) == 12
