"""Session files on disk, with the cache beside them: which may be replaced, and what of one a model can use."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlm.cache import fingerprint
from mlxlm.chat.answer import decodes_to
from mlxlm.chat.branches import Branches
from mlxlm.chat.chat_template import NAMES
from mlxlm.chat.session_format import Session, decode_session, encode_session
from mlxlm.generation import Context, LoadedModel
from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line
from mlxlm.utils.files import atomic_new_file, write_bytes

_LARGEST = 32 << 20  # bytes; a chat of a million tokens has 10 MB


def model_fingerprints(lm: LoadedModel) -> tuple[str, str]:
    """Of the weights and of the tokenizer: equal for the same model wherever it lies."""
    return fingerprint(lm.model), lm.tokenizer.fingerprint


def cache_path(path: Path) -> Path:
    """Where the cache of a session file lies."""
    return path.with_name(path.name + ".cache.safetensors")


class SessionFiles:
    """The session files that a chat has read or written, which it may replace as long as nobody else has."""

    def __init__(self) -> None:
        self._digests: dict[Path, bytes] = {}

    def write(self, path: Path, session: Session, context: Context | None, lm: LoadedModel) -> None:
        """Write the session, and the cache of `context` beside it. Raises as `Chat.save` does."""
        content = encode_session(session)
        if len(content) > _LARGEST:
            problem = f"this chat has {len(content)} bytes, more than the {_LARGEST} of a session file"
            raise GenerationError(problem, "a new chat")
        place = path.resolve()
        if place in self._digests and place.exists():
            if _digest(read_bytes(place, _LARGEST, GenerationError)) != self._digests[place]:
                raise GenerationError(f"{path} was changed by someone else meanwhile", "another name for this chat")
            write_bytes(place, content, GenerationError)
        else:
            with atomic_new_file(path, GenerationError, "another name for this chat") as file:
                file.write(content)
        self._digests[place] = _digest(content)
        if context is not None and len(context):
            context.save(cache_path(place), lm, replace=True)

    def read(self, path: Path) -> Session:
        """Raises GenerationError, naming path and line, for what is no session file."""
        content = read_bytes(path, _LARGEST, GenerationError)
        session = decode_session(content, path)
        self._digests[path.resolve()] = _digest(content)
        return session


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


@dataclass
class OpenedSession:
    """A session as a model can go on with it. `settings`: arguments of Chat; `notes`: what a person should know."""

    settings: dict[str, Any]
    branches: Branches
    notes: list[str]
    same_model: bool


def found(session: Session, path: Path, lm: LoadedModel, chat_template: str | None) -> OpenedSession:
    """What `lm` can use of the session in `path`. `chat_template`: the one that was asked for, if any.

    Another model takes the text and how it is drawn, with its own template and cache. Ids of answers count where the
    tokenizer is the same and they spell the text; a chat template out of a file is not read, as a session file from
    elsewhere could name any file.
    """
    notes, options, branches = [], dict(session.options), session.branches
    weights, tokenizer = model_fingerprints(lm)
    same_tokens = session.tokenizer == tokenizer
    branches.drop_ids_unless(lambda turn: same_tokens and decodes_to(lm.tokenizer, turn.ids, turn.answer))
    if not same_tokens:
        options.pop("logit_bias", None)
    settings: dict[str, Any] = {"system_prompt": session.system_prompt, "context_overflow": session.context_overflow}
    same_model = same_tokens and session.weights == weights
    if not same_model:
        notes.append(f"{path} is a chat with another model, {session.model}: this one reads it again, as text")
    else:
        settings |= {
            "kv": session.kv,
            "chat_template": session.chat_template if session.chat_template in NAMES else None,
        }
        if chat_template is None and session.chat_template not in (None, *NAMES):
            notes.append(f"{path} had the chat template {session.chat_template}, which is not used unless asked for")
    return OpenedSession(settings | options, branches, [one_line(note) for note in notes], same_model)


def read_cache(path: Path, context: Context, lm: LoadedModel) -> str | None:
    """Fill `context` from the cache beside a session file, if there is one; return why that couldn't be done."""
    file = cache_path(path.resolve())
    if not file.exists():
        return None
    try:
        context.load(file, lm)
    except MlxlmError as error:
        return one_line(f"the conversation is read again, since its cache can't be used: {error.message}")
    return None
