"""What is in a session file: a chat as lines of JSON that people can read.

The first line is an object about the chat: the model by name and fingerprints, system prompt, settings, the seed of the
next answer among them. Each line after it is a message: `role` ("user", "assistant"), `content`, and of an answer
`seed`, `finish_reason`, `time` and `ids`, its tokens, which count where they spell `content` (so that content can be
edited by hand). A question follows the answer in the line before it, or the one in the line that `after` names (1: it
is the first). Where there are several branches, `branches` in the first line has the line of the last answer of each,
and how many of its oldest turns the model no longer sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from mlxlm.cache import KVOptions
from mlxlm.chat.branches import MAIN_BRANCH, MAX_BRANCHES, Branches, Conversation, Turn, check_branch_name
from mlxlm.chat.context_overflow import ContextOverflow, check_context_overflow
from mlxlm.chat.json_line import JsonLine, describe_value
from mlxlm.generation import FinishReason, GenerationOptions
from mlxlm.utils.json_files import json_line

VERSION = 1
_MARK = "mlxlm_chat"
_LINES = "the line of an answer, or 1"
_LARGEST_ID = 2**31
_MOST_TURNS = 1 << 20  # of all branches, which share lines: a small file could have any number


@dataclass(frozen=True)
class Session:
    """What a session file holds. `model`: its name, for people; `weights`, `tokenizer`: fingerprints; `chat_template`: as
    it was asked for; `options`: those of GenerationOptions that are not the chat's defaults."""

    model: str
    weights: str
    tokenizer: str
    chat_template: str | None
    system_prompt: str | None
    context_overflow: ContextOverflow
    options: dict[str, Any]
    kv: KVOptions
    branches: Branches


def encode_session(session: Session) -> bytes:
    """The content of a session file. Turns that branches have in common are there once."""
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
    header = {
        _MARK: VERSION,
        "model": session.model,
        "weights": session.weights,
        "tokenizer": session.tokenizer,
        "chat_template": session.chat_template,
        "system_prompt": session.system_prompt,
        "context_overflow": session.context_overflow,
        "options": session.options,
        "kv": non_default_fields(session.kv, KVOptions()),
    }
    if list(ends) != [MAIN_BRANCH] or ends[MAIN_BRANCH]["dropped"]:
        header |= {"branch": session.branches.name, "branches": ends}
    return b"".join(json_line(value) for value in (header, *lines))


def _answer_line(turn: Turn) -> dict[str, Any]:
    line = {"role": "assistant", "content": turn.answer, "seed": turn.seed, "finish_reason": turn.finish_reason}
    line |= {"time": turn.time, "ids": list(turn.ids) or None}
    return {name: value for name, value in line.items() if value is not None}


def non_default_fields(options: Any, defaults: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from those of `defaults`."""
    return {name: value for name, value in vars(options).items() if value != getattr(defaults, name)}


def decode_session(content: bytes, path: Path) -> Session:
    """The session in a file's content; `path` is named in errors. Raises GenerationError naming the line."""
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    header = JsonLine.parsed(path, 1, lines[0])
    version = header.get(_MARK, int, None)
    if version is None:
        raise header.error("doesn't say that this is a chat", "a file that a chat was saved to")
    if version != VERSION:
        raise header.error(f"is of a chat's version {version}", f"version {VERSION}, or a newer mlxlm")
    turns: dict[int, tuple[int, Turn]] = {}  # the line of an answer: the line before its turn, and the turn
    numbered = ((n, text) for n, text in enumerate(lines[1:], 2) if text.strip())
    last = 1
    for number, text in numbered:
        question = JsonLine.parsed(path, number, text)
        after = question.get("after", int, last)
        if question.get("role", str) != "user":
            raise question.error("is not a message of the user, whose turn it is", 'one whose role is "user"')
        if after != 1 and after not in turns:
            raise question.error(f"comes after line {after}, which is no answer above it", _LINES)
        number, text = next(numbered, (number, None))
        if text is None:
            raise question.error("is a message without an answer", "the same file without it")
        answer = JsonLine.parsed(path, number, text)
        turns[number] = after, _turn(question, answer)
        last = number
    with header.named():
        return Session(
            model=header.get("model", str, "?"),
            weights=header.get("weights", str, ""),
            tokenizer=header.get("tokenizer", str, ""),
            chat_template=header.get("chat_template", str, None),
            system_prompt=header.text("system_prompt", None),
            context_overflow=check_context_overflow(header.get("context_overflow", str, "stop")),
            options=_settings(header, "options", GenerationOptions),
            kv=KVOptions(**_settings(header, "kv", KVOptions)),
            branches=_branches(header, turns, last),
        )


def _turn(question: JsonLine, answer: JsonLine) -> Turn:
    if answer.get("role", str) != "assistant":
        raise answer.error("is not the model's answer to the line above", 'one whose role is "assistant"')
    ids = answer.get("ids", list, [])
    if not all(type(id) is int and 0 <= id < _LARGEST_ID for id in ids):
        raise answer.error("has ids that are no token ids", "the same line without ids")
    reason = answer.get("finish_reason", str, None)
    if reason not in (None, *get_args(FinishReason)):
        raise answer.error(f"has the finish_reason {reason!r}", "one of " + ", ".join(get_args(FinishReason)))
    return Turn(
        question.text("content"), answer.text("content"), tuple(ids), answer.get("seed", int, None), reason,
        answer.get("time", str, None),
    )  # fmt: skip


def _count(line: JsonLine, name: str) -> int:
    count = line.get(name, int, 0)
    if not 0 <= count < 2**63:
        raise line.error(f"has the {name} {describe_value(count)}", "a whole number from 0")
    return count


def _settings(header: JsonLine, name: str, kind: type) -> dict[str, Any]:
    """The fields of a dataclass that the header has under this name, as the dataclass takes them."""
    values = header.get(name, dict, {})
    names = [field.name for field in fields(kind)]
    if unknown := sorted(set(values) - set(names)):
        raise header.error(f"has {', '.join(unknown)} in its {name}, which is no setting", "one of " + ", ".join(names))
    checked = kind(**values)
    return {name: getattr(checked, name) for name in values}


def _branches(header: JsonLine, turns: Mapping[int, tuple[int, Turn]], last: int) -> Branches:
    ends = header.get("branches", dict, {MAIN_BRANCH: {"line": last}})
    current = header.get("branch", str, next(iter(ends), MAIN_BRANCH))
    if current not in ends or len(ends) > MAX_BRANCHES:
        problem = f"more than {MAX_BRANCHES} branches" if current in ends else f"no branch {describe_value(current)}"
        raise header.error(f"has {problem}", f"at most {MAX_BRANCHES} branches, its own among them")
    conversations, room = {}, _MOST_TURNS
    for name, end in ends.items():
        check_branch_name(name)
        place = header.inner(end, f"the branch {name}")
        line, dropped = place.get("line", int, 1), _count(place, "dropped")
        if line != 1 and line not in turns:
            raise header.error(f"has the branch {name} end at line {line}, which is no answer", _LINES)
        found = tuple(islice(_back(turns, line), room + 1))[::-1]
        room -= len(found)
        if room < 0:
            raise header.error(f"has more than {_MOST_TURNS} turns in all its branches", "fewer branches")
        if dropped > len(found):
            raise header.error(f"has {dropped} turns dropped of the branch {name}, which has {len(found)}", "fewer")
        conversations[name] = Conversation(found, dropped)
    return Branches(conversations, current)


def _back(turns: Mapping[int, tuple[int, Turn]], line: int) -> Iterator[Turn]:
    while line != 1:  # ends: every turn comes after a line above it
        line, turn = turns[line]
        yield turn
