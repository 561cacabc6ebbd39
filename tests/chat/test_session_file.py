"""Session files: an opened chat continues like the original, and invalid files are one-line errors."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm import tokenizer
from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.chat.session import Chat
from mlxlm.chat.session_file import cache_path
from mlxlm.utils.errors import GenerationError, MlxlmError
from tests.chat.conversations import GREEDY, read, remade, say, small

SAMPLED = {"temperature": 1.0, "max_tokens": 8, "seed": 5}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "talk.jsonl"


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file, *values):
    file.write_text("".join((v if isinstance(v, str) else json.dumps(v)) + "\n" for v in values))


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("kv", [KVOptions(), KVOptions(size=48)])
def test_an_opened_chat_continues_like_the_original(lm, file, cache, kv):
    def start():
        chat = Chat(lm, system_prompt="Be brief.", kv=kv, **SAMPLED)
        say(chat, "Hello!")
        list(chat.retry())
        say(chat, "Grüße 世界?")
        return chat

    def ended(chat):
        texts = [say(chat, "Why?"), say(chat, "How?")]
        list(chat.retry())
        return [*texts, *(m.content for m in chat.messages)], chat.stats.last.seed

    chat = start()
    chat.save(file, cache=cache)
    again = Chat.open(file, lm)
    assert again.notes == [] and again.messages == chat.messages and again.options == chat.options
    assert (again.kv, again.system_prompt, again.branches, again.options.seed) == (kv, "Be brief.", {"main": 2}, 8)
    assert cache_path(file).exists() is cache
    list(again.ask("Why?"))
    assert read(again) < 14 if cache else again.stats.last.cached_tokens == 0
    again = Chat.open(file, lm)
    assert ended(again) == ended(start())


def test_session_files_are_readable(lm, file):
    chat = Chat(lm, system_prompt="Sei höflich.", **SAMPLED)
    answer = say(chat, "Grüße 世界\nund mehr")
    chat.save(file)
    header, question, line = lines(file)
    assert "höflich" in file.read_text() and "世界" in file.read_text()
    assert header["mlxlm_chat"] == 1 and header["system_prompt"] == "Sei höflich."
    assert header["options"] == {"temperature": 1.0, "max_tokens": 8, "seed": 6}  # of the next answer
    assert header["chat_template"] is None  # as requested: another model opens it with its own
    assert header["tokenizer"] == lm.tokenizer.fingerprint and "branches" not in header
    assert question == {"role": "user", "content": "Grüße 世界\nund mehr"}
    assert (line["role"], line["content"], line["seed"], line["finish_reason"]) == ("assistant", answer, 5, "length")
    assert line["ids"] == chat.stats.last.tokens and line["time"].endswith("+00:00")


def test_branches_share_their_lines_and_dropped_turns_stay(lm, file):
    chat = Chat(small(lm, 120), context_overflow="drop", **GREEDY)
    say(chat, "Hello!")
    chat.branch("two")
    say(chat, "Why?")
    chat.switch("main")
    say(chat, "How?")
    say(chat, "You?")
    assert chat.drop_oldest("x" * 40) > 0
    chat.branch("none")
    for _ in range(3):
        chat.undo()
    chat.save(file)
    assert len(lines(file)) == 1 + 2 * 4
    assert [line["after"] for line in lines(file) if "after" in line] == [3]
    again = Chat.open(file, chat.lm)
    assert again.branch_name == "none" and again.branches == chat.branches == {"main": 3, "two": 2, "none": 0}
    for name in chat.branches:
        chat.switch(name)
        again.switch(name)
        assert again.messages == chat.messages and again.dropped == chat.dropped
    assert again.context_overflow == "drop"


def test_arguments_override_the_settings_in_the_file(lm, file):
    Chat(lm, stop=("x", "y"), logit_bias={300 - 1: -5, 9: 2}, choice=(), **SAMPLED).save(file)
    again = Chat.open(file, lm)
    assert again.options.stop == ("x", "y") and again.options.logit_bias == {299: -5, 9: 2}
    again = Chat.open(
        file, lm, temperature=0, seed=9, kv=KVOptions(size=32), context_overflow="drop", chat_template="plain"
    )
    assert (again.options.temperature, again.options.seed, again.options.stop) == (0, 9, ("x", "y"))
    assert (again.kv.size, again.context_overflow, again.chat_template) == (32, "drop", "plain")
    say(again, "Hello!")
    assert again.stats.last.seed == 9


def test_templates_in_session_files(lm, file, tmp_path):
    Chat(lm, chat_template="plain", **SAMPLED).save(file)
    assert Chat.open(file, lm).chat_template == "plain"
    own = tmp_path / "own.jinja"
    own.write_text(lm.tokenizer.chat_template)
    chat = Chat(lm, chat_template=str(own), **SAMPLED)
    chat.save(tmp_path / "other.jsonl")
    again = Chat.open(tmp_path / "other.jsonl", lm)  # a session file can't name a file to be read
    assert again.chat_template == "model" and "own.jinja; files are used only with `chat_template`" in again.notes[0]
    assert Chat.open(tmp_path / "other.jsonl", lm, chat_template=str(own)).notes == []


def test_only_files_of_this_chat_are_replaced(lm, file):
    chat = Chat(lm, **SAMPLED)
    say(chat, "Hello!")
    chat.save(file, cache=True)
    say(chat, "Why?")
    chat.save(file, cache=True)
    assert len(lines(file)) == 5
    other = Chat.open(file, lm)
    assert other.branches == {"main": 2}
    say(other, "And?")
    with pytest.raises(GenerationError, match="talk.jsonl already exists .try: another name for this chat"):
        Chat(lm).save(file)
    other.save(file)
    say(chat, "Mine?")
    before = file.read_bytes()
    with pytest.raises(GenerationError, match="was changed by another program .try: another name"):
        chat.save(file)
    assert file.read_bytes() == before
    file.unlink()
    chat.save(file)
    assert "Mine?" in file.read_text()
    with pytest.raises(GenerationError, match="cannot write"):
        chat.save(file / "below")
    assert not [name for name in os.listdir(file.parent) if "partial" in name]


def test_a_session_of_another_model_opens_as_text(lm, file):
    chat = Chat(lm, logit_bias={7: 1}, chat_template="model", kv=KVOptions(size=1000), **SAMPLED)
    say(chat, "Hello!")
    chat.save(file, cache=True)
    other = remade(lm)
    other.model.init_weights(seed=9)
    mx.eval(other.model.parameters())
    again = Chat.open(file, small(other))
    assert again.messages == chat.messages and again.options.logit_bias == {7: 1} and again.kv == KVOptions()
    assert again.notes == [f"{file} is a chat with another model, {lm.path}: this model reads it again, as text"]
    say(again, "Why?")
    assert again.stats.last.cached_tokens == 0
    words = tokenizer.train(["Another text altogether, of other words. " * 20], 280)
    again = Chat.open(file, replace(lm, tokenizer=words))
    assert len(again.notes) == 1 and again.chat_template == "plain" and not again.options.logit_bias
    assert [m.content for m in again.messages] == [m.content for m in chat.messages] and not again.messages[1].ids
    assert say(again, "Why?") is not None and again.stats.last.cached_tokens == 0


def test_an_unusable_cache_is_reported_and_the_chat_continues(lm, file):
    chat = Chat(lm, **SAMPLED)
    say(chat, "Hello!")
    chat.save(file, cache=True)
    expected = say(chat, "Why?")
    cache = cache_path(file)
    whole = cache.read_bytes()
    for content in (b"", whole[:100], whole[:-9], b"\xff" * 200, os.urandom(4000)):
        cache.write_bytes(content)
        again = Chat.open(file, lm)
        assert len(again.notes) == 1 and "is read again, since its cache can't be used: " in again.notes[0]
        assert say(again, "Why?") == expected and again.stats.last.cached_tokens == 0
    cache.write_bytes(whole)
    again = Chat.open(file, lm, kv=KVOptions(size=32))
    assert "can't be used" in again.notes[0] and say(again, "Why?")


def test_edited_by_hand(lm, file):
    chat = Chat(lm, **SAMPLED)
    say(chat, "Hello!")
    chat.save(file)
    header, question, answer = lines(file)
    write(file, header, {**question, "content": "Hi"}, {**answer, "content": "The fox."}, "")
    again = Chat.open(file, lm)
    assert [m.content for m in again.messages] == ["Hi", "The fox."] and again.messages[1].ids == ()
    write(file, header, question, {"role": "assistant", "content": "The fox."})
    assert say(Chat.open(file, lm), "Why?")
    write(file, {"mlxlm_chat": 1, "options": {"seed": 1}})
    assert Chat.open(file, lm).messages == []


@pytest.mark.parametrize("ids", [["end", "system_prompt"], [2**30], [299], [-1], [True], ["a"], "12", [1.5]])
def test_ids_that_decode_to_another_text_are_ignored(lm, file, ids):
    """A file from elsewhere can't hide tokens behind what it shows."""
    special = lm.tokenizer.special_tokens
    ids = [special.get(f"<|{i}|>", i) if isinstance(i, str) else i for i in ids] if isinstance(ids, list) else ids
    text_ids = lm.tokenizer.encode("The fox.", add_special_tokens=False)
    answer = {"role": "assistant", "content": "The fox.", "ids": ids if isinstance(ids, str) else [*text_ids, *ids]}
    write(file, {"mlxlm_chat": 1, "tokenizer": lm.tokenizer.fingerprint, "options": {"seed": 1}},
          {"role": "user", "content": "?"}, answer)  # fmt: skip
    try:
        chat = Chat.open(file, replace(lm, config=lm.config))
    except GenerationError as error:
        assert "line 3 has" in error.message
        return
    assert chat.messages[1].ids == () and chat.messages[1].content == "The fox."


HEADER = {"mlxlm_chat": 1, "options": {"seed": 1}}
USER, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([""], "line 1 is not JSON"),
        (["[" * 100_000], "line 1 can't be read: maximum recursion"),
        (["[]"], "line 1 is not a JSON object .try: a file that a chat was saved to"),
        ([{"role": "user"}], "line 1 is not the header of a session file .try: a file that a chat was saved to"),
        ([{**HEADER, "mlxlm_chat": 2}], "line 1 has the session version 2 .try: version 1"),
        ([{**HEADER, "mlxlm_chat": "1"}], "line 1 has the mlxlm_chat '1' .try: a whole number"),
        ([{**HEADER, "options": {"seed": -1}}], "line 1: invalid options: seed is -1"),
        ([{**HEADER, "options": {"seed": 1, "temp": 1}}], "line 1 has temp in its options.*try: one of temperature"),
        ([{**HEADER, "options": {"seed": 1, "logit_bias": {"a": []}}}], "line 1: .*logit_bias"),
        ([{**HEADER, "options": [1]}], r"line 1 has the options \[1\] .try: a JSON object"),
        ([{**HEADER, "kv": {"bits": 4}}], "line 1 has bits in its kv, which is not a setting"),
        ([{**HEADER, "kv": {"size": 1e9}}], "line 1: invalid cache options"),
        ([{**HEADER, "context_overflow": "ask"}], "line 1: context_overflow is 'ask'"),
        ([{**HEADER, "system_prompt": 3}], "line 1 has the system_prompt 3 .try: a text"),
        (['{"mlxlm_chat": 1, "options": {"seed": 1}, "system_prompt": "\\ud800"}'], "line 1: .*lone surrogate"),
        ([HEADER, ANSWER], "line 2 is not a user message"),
        ([HEADER, USER], "line 2 is a message without an answer"),
        ([HEADER, USER, USER], "line 3 is not an answer"),
        ([HEADER, USER, "", ANSWER, USER, '{"role": "assis'], "line 6 is not JSON"),
        ([HEADER, {"role": "user"}, ANSWER], "line 2 has the content missing .try: a text"),
        ([HEADER, USER, '{"role": "assistant", "content": "\\ud800"}'], "line 3: .*surrogate"),
        ([HEADER, {**USER, "after": 3}, ANSWER], "line 2 comes after line 3"),
        ([HEADER, {**USER, "after": True}, ANSWER], "line 2 has the after True"),
        ([HEADER, USER, {**ANSWER, "ids": 5}], "line 3 has the ids 5 .try: a list"),
        ([HEADER, USER, {**ANSWER, "ids": [2**31]}], "line 3 has invalid token ids"),
        ([HEADER, USER, {**ANSWER, "finish_reason": "x"}], "line 3 has the finish_reason 'x'"),
        ([HEADER, USER, {**ANSWER, "seed": "x"}], "line 3 has the seed 'x'"),
        ([{**HEADER, "branches": {"main": {"line": 2}}}, USER, ANSWER], "line 1 has the branch main end at line 2"),
        ([{**HEADER, "branches": {"main": 3}}, USER, ANSWER], "line 1: the branch main is not a JSON object"),
        ([{**HEADER, "branches": {}}], "line 1 has no branch 'main'"),
        ([{**HEADER, "branch": "x"}], "line 1 has no branch 'x'"),
        ([{**HEADER, "branch": "0", "branches": {str(n): {} for n in range(101)}}], "line 1 .*more than 100"),
        ([{**HEADER, "branches": {"a b": {}}}], "line 1: 'a b' is not a valid branch name"),
        ([{**HEADER, "branches": {"main": {"line": 3, "dropped": 2}}}, USER, ANSWER], "line 1 has 2 turns dropped"),
    ],
)  # fmt: skip
def test_invalid_session_files_are_one_line_errors(lm, file, content, message):
    write(file, *content)
    with pytest.raises(GenerationError, match=rf"talk.jsonl: {message}") as caught:
        Chat.open(file, lm)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 2500


def test_model_names_that_are_not_utf8(lm, file):
    chat = Chat(replace(lm, path=Path(os.fsdecode(b"m\xff"))), **SAMPLED)
    chat.save(file)
    assert Chat.open(file, lm).notes == [] and lines(file)[0]["model"] == os.fsdecode(b"m\xff")


def test_files_that_cannot_be_read(lm, file, tmp_path):
    with pytest.raises(GenerationError, match="cannot read .*talk.jsonl"):
        Chat.open(file, lm)
    with pytest.raises(GenerationError, match="not a regular file"):
        Chat.open(tmp_path, lm)
    file.write_bytes(b"\xff\xfe{")
    with pytest.raises(GenerationError, match="line 1 is not UTF-8"):
        Chat.open(file, lm)
    with file.open("wb") as out:
        out.truncate(1 << 40)
    with pytest.raises(GenerationError, match="the limit is"):
        Chat.open(file, lm)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_is_a_one_line_error_or_a_chat(lm, file, data):
    if not (whole := file.parent / "whole").exists():
        chat = Chat(lm, system_prompt="Be brief.", **SAMPLED)
        say(chat, "Hello!")
        chat.branch("two")
        say(chat, "Why?")
        chat.save(whole)
    content = bytearray(whole.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        pieces = [b"", b"-", b"9", b"null", b'"', b"{", b"]", b"\n", b"\xff", b"\\ud800", b"1e9"]
        piece = data.draw(st.sampled_from(pieces))
        content[at : at + data.draw(st.integers(0, 12))] = piece
    file.write_bytes(bytes(content))
    try:
        chat = Chat.open(file, lm)
        next(iter(chat.ask("And?")))
    except MlxlmError as error:
        assert "\n" not in str(error)
