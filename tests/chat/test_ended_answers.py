"""Answers that are ended while they are generated, also from another thread."""

from threading import Event, Thread

import pytest

from mlxlm.chat.session import Chat
from mlxlm.utils.errors import GenerationError
from tests.chat.conversations import GREEDY, say
from tests.generation.recording_model import TIMEOUT

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
