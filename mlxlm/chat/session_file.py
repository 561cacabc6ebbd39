"""Session files: a chat as JSON lines that people can read, and its key-value cache.

The first line describes the chat: the model by name and fingerprints, system prompt, and settings, including the seed
of the next answer. Each further line is a message: `role` ("user" or "assistant") and `content`; an answer also has
`seed`, `finish_reason`, `time` and `ids`. The ids count only if they decode to `content`, so that content can be
edited by hand. A question follows the answer in the line above it, or the one in line `after` (1: it is the first).
If there are several branches, `branches` in the first line has the line of the last answer of each, and how many of
its oldest turns the model no longer sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from mlxlm.cache import KVOptions, fingerprint
from mlxlm.chat.chat_model import decodes_to
from mlxlm.chat.chat_template import NAMES
from mlxlm.chat.history import (
    MAIN_BRANCH,
    MAX_BRANCHES,
    Branches,
    ContextOverflow,
    Conversation,
    Turn,
    check_branch_name,
    check_context_overflow,
)
from mlxlm.chat.messages import Message
from mlxlm.chat.reasoning import check_effort
from mlxlm.chat.tool_calls import MessageStyle
from mlxlm.config.option import non_default_fields
from mlxlm.generation import FinishReason, GenerationOptions, LoadedModel
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line
from mlxlm.utils.files import atomic_new_file, write_bytes
from mlxlm.utils.json_files import json_line, parse_json, parse_json_object

VERSION = 1
_VERSION_KEY = "mlxlm_chat"
_LINE_HINT = "the line of an answer, or 1"
_MAX_ID = 2**31
_STYLE = MessageStyle(text_arguments=True)
_MAX_BYTES = 32 << 20  # a chat of a million tokens takes 10 MB


@dataclass(frozen=True)
class Session:
    """The content of a session file.

    Attributes:
        model: Name of the model, for people.
        weights: Fingerprint of the weights.
        tokenizer: Fingerprint of the tokenizer.
        chat_template: The template as it was requested.
        system_prompt: The system prompt.
        context_overflow: The overflow policy.
        reasoning_effort: How much the model should reason, if that was set.
        options: The GenerationOptions that differ from the chat's defaults.
        kv: Options of the key-value cache.
        branches: The conversation.
    """

    model: str
    weights: str
    tokenizer: str
    chat_template: str | None
    system_prompt: str | None
    context_overflow: ContextOverflow
    reasoning_effort: str | None
    options: dict[str, Any]
    kv: KVOptions
    branches: Branches


def encode_session(session: Session) -> bytes:
    """Return the content of a session file. Turns shared by several branches are written once."""
    lines: list[dict[str, Any]] = []
    line_of: dict[tuple[int, Turn], int] = {}
    ends: dict[str, dict[str, int]] = {}
    for name, conversation in session.branches.all.items():
        end = 1
        for turn in conversation.turns:
            if (end, turn) not in line_of:
                last = len(lines) + 1
                after = {} if end == last else {"after": end}
                lines += [{"role": "user", "content": turn.question, **after}, _answer_line(turn)]
                line_of[end, turn] = len(lines) + 1
            end = line_of[end, turn]
        ends[name] = {"line": end, "dropped": conversation.dropped}
    header = {_VERSION_KEY: VERSION, **vars(session), "kv": non_default_fields(session.kv, KVOptions())}
    del header["branches"]
    if list(ends) != [MAIN_BRANCH] or ends[MAIN_BRANCH]["dropped"]:
        header |= {"branch": session.branches.name, "branches": ends}
    return b"".join(json_line(value) for value in (header, *lines))


def _answer_line(turn: Turn) -> dict[str, Any]:
    line: dict[str, Any] = {"role": "assistant", "content": turn.answer, "seed": turn.seed}
    line |= {"finish_reason": turn.finish_reason, "time": turn.time, "ids": list(turn.ids) or None}
    line |= {"steps": [_STYLE.to_dict(message) for message in turn.steps] or None}
    return {name: value for name, value in line.items() if value is not None}


def decode_session(content: bytes, path: Path) -> Session:
    """Parse the content of a session file. Raise GenerationError, naming `path` and the line, if it is not one."""
    header, lines = _split(content, path)
    turns: dict[int, tuple[int, Turn]] = {}  # the line of an answer: the line before its turn, and the turn
    numbered = ((n, text) for n, text in enumerate(lines, 2) if text.strip())
    last = 1
    for number, text in numbered:
        question = _JsonLine.parse(path, number, text)
        after = question.get("after", int, last)
        if question.get("role", str) != "user":
            raise question.error("is not a user message", 'one whose role is "user"')
        if after != 1 and after not in turns:
            raise question.error(f"comes after line {after}, which is not an answer above it", _LINE_HINT)
        last, text = next(numbered, (0, b""))
        if not text:
            raise question.error("is a message without an answer", "the same file without it")
        turns[last] = after, _turn(question, _JsonLine.parse(path, last, text))
    with header.add_location():
        return Session(
            model=header.get("model", str, "?"),
            weights=header.get("weights", str, ""),
            tokenizer=header.get("tokenizer", str, ""),
            chat_template=header.get("chat_template", str, None),
            system_prompt=header.text("system_prompt", None),
            context_overflow=check_context_overflow(header.get("context_overflow", str, "stop")),
            reasoning_effort=check_effort(header.get("reasoning_effort", str, None)),
            options=_settings(header, "options", GenerationOptions),
            kv=KVOptions(**_settings(header, "kv", KVOptions)),
            branches=_branches(header, turns, last),
        )


def peek_session(path: Path) -> tuple[str, list[Message]]:
    """Return the model's name and the messages of all branches, for a list of sessions.

    Takes a third of the time of `decode_session`, which checks more. Raises GenerationError as it does.
    """
    header, lines = _split(read_bytes(path, _MAX_BYTES, GenerationError), path)
    messages = []
    for number, line in enumerate(lines, 2):
        if line.strip():
            location = f"{path}: line {number}"
            value = _JsonLine(location, parse_json(line, location, GenerationError))
            messages.append(Message(value.get("role", str), value.get("content", str)))
    return header.get("model", str, "?"), messages


def _split(content: bytes, path: Path) -> tuple[_JsonLine, list[bytes]]:
    """Return the header and the other lines of a session file."""
    first, *lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    header = _JsonLine.parse(path, 1, first)
    version = header.get(_VERSION_KEY, int, None)
    if version is None:
        raise header.error("is not the header of a session file", "a file that a chat was saved to")
    if version != VERSION:
        raise header.error(f"has the session version {version}", f"version {VERSION}, or a newer mlxlm")
    return header, lines


def _turn(question: _JsonLine, answer: _JsonLine) -> Turn:
    if answer.get("role", str) != "assistant":
        raise answer.error("is not an answer to the line above", 'one whose role is "assistant"')
    ids = answer.get("ids", list, [])
    if not all(type(id) is int and 0 <= id < _MAX_ID for id in ids):
        raise answer.error("has invalid token ids", "the same line without ids")
    reason = answer.get("finish_reason", str, None)
    if reason not in (None, *get_args(FinishReason)):
        raise answer.error(f"has the finish_reason {reason!r}", "one of " + ", ".join(get_args(FinishReason)))
    with answer.add_location():
        steps = tuple(_step(value) for value in answer.get("steps", list, []))
    return Turn(
        question=question.text("content"),
        answer=answer.text("content"),
        ids=tuple(ids),
        seed=answer.get("seed", int, None),
        finish_reason=reason,
        time=answer.get("time", str, None),
        steps=steps,
    )


def _step(value: Any) -> Message:
    """Return a message with calls or a result."""
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise GenerationError(f"{value!r:.60} is not one of the steps of an answer", "a message with a content")
    message = Message.from_dict({"role": "", "weight": 1, **value})
    if message.role != "tool" and not (message.role == "assistant" and message.tool_calls):
        raise GenerationError(f"{value!r:.60} has neither calls nor a result", "the role tool, or tool_calls")
    for call in message.tool_calls:
        call.parsed_arguments()
    return message.map_strings(_checked)


def _checked(text: str) -> str:
    check_unicode(text)
    return text


def _settings(header: _JsonLine, name: str, kind: type) -> dict[str, Any]:
    """Return the fields of the dataclass `kind` that the header has under `name`, validated and converted."""
    values = header.get(name, dict, {})
    names = [field.name for field in fields(kind)]
    if unknown := sorted(set(values) - set(names)):
        raise header.error(
            f"has {', '.join(unknown)} in its {name}, which is not a setting", "one of " + ", ".join(names)
        )
    checked = kind(**values)
    return {name: getattr(checked, name) for name in values}


def _branches(header: _JsonLine, turns: Mapping[int, tuple[int, Turn]], last: int) -> Branches:
    ends = header.get("branches", dict, {MAIN_BRANCH: {"line": last}})
    current = header.get("branch", str, next(iter(ends), MAIN_BRANCH))
    if current not in ends or len(ends) > MAX_BRANCHES:
        problem = f"more than {MAX_BRANCHES} branches" if current in ends else f"no branch {_describe(current)}"
        raise header.error(f"has {problem}", f"at most {MAX_BRANCHES} branches, its own among them")
    conversations = {}
    for name, end in ends.items():
        check_branch_name(name)
        place = header.child(end, f"the branch {name}")
        line, dropped = place.get("line", int, 1), place.get("dropped", int, 0)
        if line != 1 and line not in turns:
            raise header.error(f"has the branch {name} end at line {line}, which is not an answer", _LINE_HINT)
        path: list[Turn] = []
        while line != 1:  # terminates: every turn comes after a line above it
            line, turn = turns[line]
            path.append(turn)
        if not 0 <= dropped <= len(path):
            raise header.error(
                f"has {_describe(dropped)} turns dropped of the branch {name}, which has {len(path)}", "fewer"
            )
        conversations[name] = Conversation(tuple(path[::-1]), dropped)
    return Branches(conversations, current)


_REQUIRED = object()
_KINDS = {int: "whole number", str: "text", list: "list", dict: "JSON object"}


class _JsonLine:
    """The JSON object in a line, whose fields are validated when they are read."""

    def __init__(self, location: str, values: Any):
        self._location, self._values = location, values
        if not isinstance(values, dict):
            raise self.error("is not a JSON object")

    @classmethod
    def parse(cls, path: Path, number: int, text: bytes) -> _JsonLine:
        location = f"{path}: line {number}"
        hint = "a file that a chat was saved to" if number == 1 else "the file up to the line before"
        return cls(location, parse_json_object(text, location, GenerationError, hint))

    def child(self, values: Any, name: str) -> _JsonLine:
        """Return an object inside this one."""
        return _JsonLine(f"{self._location}: {name}", values)

    def error(self, problem: str, hint: str | None = None) -> GenerationError:
        return GenerationError(f"{self._location} {problem}", hint)

    def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """Return a field of type `kind`. If it is null or missing, return the default, if there is one."""
        value = self._values.get(name)
        if value is None and default is not _REQUIRED:
            return default
        if type(value) is not kind:
            raise self.error(f"has the {name} {_describe(value)}", f"a {_KINDS[kind]}")
        return value

    def text(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a text that a tokenizer can encode."""
        value = self.get(name, str, default)
        with self.add_location():
            check_unicode(value or "")
        return value

    @contextmanager
    def add_location(self) -> Iterator[None]:
        """Add the line to errors raised inside the block."""
        try:
            yield
        except MlxlmError as error:
            if error.message.startswith(self._location):
                raise
            raise error.prefixed(self._location, GenerationError) from None


def _describe(value: Any) -> str:
    return "missing" if value is None else f"{value!r}"[:40]


def cache_path(path: Path) -> Path:
    """Return the path of a session file's key-value cache."""
    return path.with_name(path.name + ".cache.safetensors")


class SessionFiles:
    """The session files that a chat has read or written. It may replace them as long as nothing else changed them."""

    def __init__(self) -> None:
        self._digests: dict[Path, bytes] = {}

    def read(self, path: Path) -> Session:
        """Read a session file. Raise GenerationError, naming path and line, if it is not one."""
        content = read_bytes(path, _MAX_BYTES, GenerationError)
        session = decode_session(content, path)
        self._digests[path.resolve()] = _digest(content)
        return session

    def write(self, path: Path, session: Session) -> None:
        """Write a session file atomically. Raise GenerationError if it can't be written or replaced."""
        content = encode_session(session)
        if len(content) > _MAX_BYTES:
            problem = f"this chat has {len(content)} bytes, more than the {_MAX_BYTES} of a session file"
            raise GenerationError(problem, "a new chat")
        target = path.resolve()
        if target in self._digests and target.exists():
            if _digest(read_bytes(target, _MAX_BYTES, GenerationError)) != self._digests[target]:
                raise GenerationError(f"{path} was changed by another program", "another name for this chat")
            write_bytes(target, content, GenerationError)
        else:
            with atomic_new_file(path, GenerationError, "another name for this chat") as file:
                file.write(content)
        self._digests[target] = _digest(content)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def restore(
    session: Session, path: Path, lm: LoadedModel, chat_template: str | None
) -> tuple[dict[str, Any], list[str], bool]:
    """Decide what of a session `lm` can use.

    Another model takes the text and the options, with its own template and cache. Token ids count if the tokenizer is
    the same and they decode to the text. A template file named in the session is not read: a session file from
    elsewhere could name any file.

    Args:
        session: The content of the file.
        path: The file, for notes.
        lm: The model that continues the chat.
        chat_template: The template that the caller asks for, if any.

    Returns:
        Arguments of `Chat`, notes for the user, and whether the file was written with this model. Token ids that don't
        count are dropped from the session.
    """
    notes, options = [], dict(session.options)
    same_tokenizer = session.tokenizer == lm.tokenizer.fingerprint
    session.branches.drop_ids_unless(lambda turn: same_tokenizer and decodes_to(lm.tokenizer, turn.ids, turn.answer))
    if not same_tokenizer:
        options.pop("logit_bias", None)
    settings: dict[str, Any] = {"system_prompt": session.system_prompt, "context_overflow": session.context_overflow}
    same_model = same_tokenizer and session.weights == fingerprint(lm.model)
    if same_model:
        settings |= {"kv": session.kv, "reasoning_effort": session.reasoning_effort}
        settings["chat_template"] = session.chat_template if session.chat_template in NAMES else None
        if chat_template is None and session.chat_template not in (None, *NAMES):
            notes.append(
                f"{path} used the chat template {session.chat_template}; files are used only with `chat_template`"
            )
    else:
        notes.append(f"{path} is a chat with another model, {session.model}: this model reads it again, as text")
    return settings | options, [one_line(note) for note in notes], same_model
