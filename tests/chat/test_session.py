"""Chats: only new tokens are read, answers equal those of a fresh computation, nothing breaks a conversation."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest

import mlxlm
from mlxlm import generate, tokenizer
from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, make_cache
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.messages import Message
from mlxlm.chat.session import Chat
from mlxlm.generation import GenerationConfig
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.utils.errors import GenerationError, TokenizerError
from tests.chat.conversations import GREEDY, fresh, fresh_prompt, read, remade, say, small


class Recording:
    """A model that notes how many tokens each call reads."""

    def __init__(self, model):
        self._model, self.calls = model, []

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, ids, cache=None):
        self.calls.append(ids.shape[1])
        return self._model(ids, cache=cache)


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
    """A model that answers everything with `script`, and has the caches that it would have.

    Where the text ends with `begins` and the beginning of the script, the next token is that of the script.
    """

    def make_cache(self):
        return make_cache(self._model)

    def __init__(self, lm, script, begins="<|assistant|>\n", end="<|end|>"):
        super().__init__(lm.model)
        self._encode = partial(lm.tokenizer.encode, add_special_tokens=False, parse_special=True)
        self._scripts, self.text = [], []
        self.add(script, begins, end)

    def add(self, script, begins, end):
        """Add a script that comes before the others."""
        self._scripts.insert(0, (self._encode(begins), self._encode(script + end)))

    def __call__(self, ids, cache=None):
        self.text[cache[0].offset :] = ids[0].tolist()
        logits = super().__call__(ids, cache)
        for begins, script in self._scripts:
            for said in range(len(script) - 1, -1, -1):
                so_far = begins + script[:said]
                if self.text[-len(so_far) :] == so_far:
                    logits[0, -1, script[said]] = 1e4
                    return logits
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
    model = Scripted(lm, THOUGHT.removeprefix("<think>\n"), "<|assistant|>\n<think>\n")
    chat = Chat(replace(lm, model=model), temperature=0, max_tokens=None)
    pieces = list(chat.ask("Hello!"))
    assert "".join(piece.text for piece in pieces if piece.reasoning) == "Hm, a fox."
    assert chat.messages[-1].content == THOUGHT  # with the tag, as the model has read it
    say(chat, "Why?")
    new = "<|end|>\n<|user|>\nWhy?<|end|>\n<|assistant|>\n<think>\n"
    assert read(chat) <= len(tokens.encode(new, add_special_tokens=False, parse_special=True))
    assert chat.messages[-1].content == THOUGHT
    chat = Chat(lm, choice=["yes"], temperature=0)
    assert say(chat, "Why?") == "yes" and not any(piece.reasoning for piece in chat.ask("Why?"))
    assert chat.messages[-1].content == "<think>\n\n</think>\n\nyes"


def test_an_effort_for_which_the_template_closes_the_block(lm, tokens):
    variable = "<think>\n{{ '\n</think>\n\n' if enable_thinking is false }}"
    tokens.chat_template = tokens.chat_template.replace("assistant|>\n{% endif", f"assistant|>\n{variable}{{% endif")
    closed = Scripted(lm, "The fox.", "<|assistant|>\n<think>\n\n</think>\n\n")
    chat = Chat(replace(lm, model=closed), reasoning_effort="none", temperature=0)
    assert say(chat, "Hello!") == "The fox." and not any(piece.reasoning for piece in chat.ask("Why?"))


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
