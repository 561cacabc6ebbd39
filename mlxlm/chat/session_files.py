"""Session files on disk and their key-value caches."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxlm.cache import fingerprint
from mlxlm.chat.answer import decodes_to
from mlxlm.chat.branches import Branches
from mlxlm.chat.chat_model import ChatModel
from mlxlm.chat.chat_template import NAMES
from mlxlm.chat.session_format import Session, decode_session, encode_session, non_default_fields
from mlxlm.generation import Engine, LoadedModel
from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line
from mlxlm.utils.files import atomic_new_file, write_bytes

if TYPE_CHECKING:
    from mlxlm.chat.session import Chat

_MAX_BYTES = 32 << 20  # a chat of a million tokens takes 10 MB


def cache_path(path: Path) -> Path:
    """Return the path of a session file's key-value cache."""
    return path.with_name(path.name + ".cache.safetensors")


class SessionFiles:
    """The session files that a chat has read or written. It may replace them as long as nothing else changed them."""

    def __init__(self) -> None:
        self._digests: dict[Path, bytes] = {}

    def save(self, path: Path, chat: Chat, branches: Branches, chat_model: ChatModel, cache: bool) -> None:
        """Write a chat, and with `cache` its key-value cache. Raise as `Chat.save` does."""
        weights, tokenizer = _model_fingerprints(chat.lm)
        session = Session(
            model=str(chat.lm.path),
            weights=weights,
            tokenizer=tokenizer,
            chat_template=chat_model.requested_chat_template,
            system_prompt=chat.system_prompt,
            context_overflow=chat.context_overflow,
            options=non_default_fields(chat.options, chat.defaults),
            kv=chat.kv,
            branches=branches,
        )
        self._write(path, encode_session(session))
        if cache:
            chat_model.engine.save_prefix(cache_path(path.resolve()), chat.context_ids)

    def read(self, path: Path) -> Session:
        """Read a session file. Raise GenerationError, naming path and line, if it is not one."""
        content = read_bytes(path, _MAX_BYTES, GenerationError)
        session = decode_session(content, path)
        self._digests[path.resolve()] = _digest(content)
        return session

    def _write(self, path: Path, content: bytes) -> None:
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


def _model_fingerprints(lm: LoadedModel) -> tuple[str, str]:
    """Return fingerprints of the weights and the tokenizer, which don't depend on where the model is stored."""
    return fingerprint(lm.model), lm.tokenizer.fingerprint


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
    weights, tokenizer = _model_fingerprints(lm)
    same_tokenizer = session.tokenizer == tokenizer
    session.branches.drop_ids_unless(lambda turn: same_tokenizer and decodes_to(lm.tokenizer, turn.ids, turn.answer))
    if not same_tokenizer:
        options.pop("logit_bias", None)
    settings: dict[str, Any] = {"system_prompt": session.system_prompt, "context_overflow": session.context_overflow}
    same_model = same_tokenizer and session.weights == weights
    if same_model:
        settings["kv"] = session.kv
        settings["chat_template"] = session.chat_template if session.chat_template in NAMES else None
        if chat_template is None and session.chat_template not in (None, *NAMES):
            notes.append(
                f"{path} used the chat template {session.chat_template}; files are used only with --chat-template"
            )
    else:
        notes.append(f"{path} is a chat with another model, {session.model}: this model reads it again, as text")
    return settings | options, [one_line(note) for note in notes], same_model


def read_cache(path: Path, engine: Engine) -> str | None:
    """Load the key-value cache of a session file, if there is one; return why that failed, or None."""
    file = cache_path(path.resolve())
    if not file.exists():
        return None
    try:
        engine.load_prefix(file)
    except MlxlmError as error:
        return one_line(f"the conversation is read again, since its cache can't be used: {error.message}")
    return None
