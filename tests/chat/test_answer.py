"""The model continues its last answer, also from another text, and reads only what was changed."""

from contextlib import closing
from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm import generate, tokenizer
from mlxlm.chat.chat_model import decodes_to, edited_answer
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.history import ContextFullError
from mlxlm.chat.messages import Message
from mlxlm.chat.session import Chat
from mlxlm.utils.errors import GenerationError, TokenizerError
from tests.chat.conftest import TEMPLATE, TEXT
from tests.chat.conversations import GREEDY, read


@pytest.fixture
def chat(lm):
    """A chat with two answers."""
    chat = Chat(lm, system_prompt="Be brief.", **GREEDY)
    for question in ("Hello!", "How are you?"):
        list(chat.ask(question))
    return chat


@pytest.fixture(scope="session")
def trained():
    return tokenizer.train(TEXT, 300)


def go_on(chat, *text):
    return "".join(chunk.text for chunk in chat.continue_answer(*text))


def question_ids(chat):
    """The tokens before the last answer."""
    return ChatTemplate(chat.lm.tokenizer).encode(chat.messages[:-1])


def test_an_answer_continues_where_it_was_cut_off(chat):
    before, question = chat.messages[-1], question_ids(chat)
    expected = generate(chat.lm, [*question, *before.ids], **GREEDY)
    text = go_on(chat)
    assert text == expected.text and read(chat) == 1  # the last token of an answer was never read
    after = chat.messages[-1]
    assert after.content == before.content + text and after.ids == (*before.ids, *expected.tokens)
    assert chat.branches == {"main": 2}
    assert go_on(chat) and chat.stats.last.cached_tokens == len(question) + 23
    list(chat.ask("Why?"))
    assert chat.stats.last.cached_tokens == len(question) + 35  # the next question finds all of it, too


def test_an_edited_answer_continues_from_its_new_text(chat):
    tokenizer, question = chat.lm.tokenizer, question_ids(chat)
    kept = chat.messages[-1].ids[:5]
    text = tokenizer.decode(kept, skip_special_tokens=False) + " quick fox"
    rest = tokenizer.encode(" quick fox", add_special_tokens=False, continues=True)
    expected = generate(chat.lm, [*question, *kept, *rest], **GREEDY)
    assert go_on(chat, text) == expected.text
    assert chat.messages[-1].content == text + expected.text
    assert read(chat) <= len(rest) and chat.stats.last.cached_tokens >= len(question) + len(kept)
    assert (
        go_on(chat, "Another text")
        == generate(
            chat.lm, [*question, *tokenizer.encode("Another text", add_special_tokens=False, continues=True)], **GREEDY
        ).text
    )
    assert chat.stats.last.cached_tokens == len(question)


def test_a_model_without_a_template_continues_its_text(lm):
    chat = Chat(lm, chat_template="plain", **GREEDY)
    list(chat.ask("The quick"))
    ids = [*lm.tokenizer.encode("The quick"), *chat.messages[-1].ids]
    assert go_on(chat) == generate(lm, ids, **GREEDY).text and read(chat) == 1
    brown = [*ids[: len(lm.tokenizer.encode("The quick"))], *lm.tokenizer.encode(" brown", continues=True)]
    assert go_on(chat, " brown") == generate(lm, brown, **GREEDY).text


def test_reasoning_continues_as_reasoning(lm, tokens):
    chat = Chat(lm, **GREEDY)
    list(chat.ask("Hello!"))
    assert all(chunk.reasoning for chunk in chat.continue_answer("<think>The fox") if chunk.text)
    assert not any(chunk.reasoning for chunk in chat.continue_answer("<think>The fox</think>The dog"))
    assert chat.messages[-1].content.startswith("<think>The fox</think>The dog")
    opening = Chat(
        replace(lm, tokenizer=with_template(tokens, TEMPLATE.replace("|>\n{% endif", "|>\n<think>\n{% endif")))
    )
    opening.options = replace(opening.options, **GREEDY)
    list(opening.ask("Hello!"))
    before = opening.messages[-1].content
    assert before.startswith("<think>\n") and go_on(opening)
    assert opening.messages[-1].content.startswith(before) and read(opening) == 1


def with_template(tokens, template):
    tokens.chat_template = template
    return tokens


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            "{% if messages | length > 2 %}{{ raise_exception('No.') }}{% endif %}",
            "No",
        ),
        ("{% if messages | length > 2 %}{% set messages = messages[:-1] %}{% endif %}", "leaves out the last message"),
    ],
)
def test_a_template_that_cannot_end_with_an_answer(lm, tokens, changed, problem):
    chat = Chat(replace(lm, tokenizer=with_template(tokens, changed + TEMPLATE)), **GREEDY)
    list(chat.ask("Hello!"))
    before = chat.messages
    chat.system_prompt = "Brief."  # so that there are three messages
    with pytest.raises(TokenizerError, match=problem):
        chat.continue_answer("Hm")
    chat.system_prompt = None
    assert chat.messages == before


def test_what_can_not_be_continued(lm):
    chat = Chat(lm, **GREEDY)
    with pytest.raises(GenerationError, match="there is no message yet"):
        chat.continue_answer("x")
    list(chat.ask("Hello!"))
    before = chat.messages
    with pytest.raises(GenerationError, match=r"the answer is empty \(try: retry"):
        chat.continue_answer("")
    with pytest.raises(TokenizerError, match="surrogate"):
        chat.continue_answer("\ud800")
    with pytest.raises(ContextFullError):
        chat.continue_answer("fox " * 5000)
    with closing(chat.continue_answer("Other")):
        pass  # stopped before the first token
    chat.options = replace(chat.options, regex="a+")
    with pytest.raises(GenerationError, match="with regex, an answer can't be continued"):
        chat.continue_answer()
    assert chat.messages == before


def test_an_answer_that_is_complete_stays(lm):
    end = lm.tokenizer.special_tokens["<|end|>"]
    chat = Chat(lm, logit_bias={end: 100}, **GREEDY)
    list(chat.ask("Hello!"))
    assert chat.messages[-1].content == ""
    assert go_on(chat, "Grüße") == "" and chat.messages[-1].content == "Grüße"
    assert go_on(chat) == "" and chat.messages[-1].content == "Grüße"


@given(st.lists(st.integers(7, 299), max_size=20), st.text(max_size=20), st.integers(0, 40))
def test_unchanged_tokens_are_kept(trained, ids, new, position):
    text = trained.decode(ids, skip_special_tokens=False)
    answer = Message("assistant", text, tuple(ids) if decodes_to(trained, ids, text) else ())
    assert not answer.ids or edited_answer(answer, text, trained) == answer
    changed = edited_answer(answer, text[:position] + new, trained)
    assert changed.content == text[:position] + new
    assert not changed.ids or decodes_to(trained, changed.ids, changed.content)

    def is_kept(n):
        return changed.content.startswith(trained.decode(answer.ids[:n], skip_special_tokens=False))

    whole = takewhile(is_kept, range(len(ids) + 1))
    kept = max(whole, default=0)
    assert not changed.ids or changed.ids[:kept] == answer.ids[:kept]
