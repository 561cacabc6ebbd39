"""JSONL: requests and their results as lines of JSON, and the file of results.

A request asks for one or more texts. Its prompt is a text, token ids, or the messages of a chat.
"""

from __future__ import annotations

import codecs
import difflib
import errno
import fcntl
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mlxlm.backend.error_text import describe_error
from mlxlm.cache import KVOptions, fingerprint
from mlxlm.config.numbers import is_int_at_least
from mlxlm.config.option import non_default_fields
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.request import Request, encode_prompt
from mlxlm.generation.result import GenerationResult, TokenLogprob, TokenLogprobs
from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError, os_errors_as
from mlxlm.utils.files import atomic_write
from mlxlm.utils.json_files import parse_json_object

MAX_LINE_BYTES = 64 * 2**20  # far more than any context, far less than memory
MAX_NUM_SAMPLES = 100_000

Id = str | int | float
Messages = list[dict[str, str]]  # each with "role" and "content"
EncodedPrompt = tuple[Sequence[int], frozenset[int] | None]  # ids, and the end tokens, None for the model's

_ROLES = ("system", "user", "assistant")
EXAMPLE_MESSAGE = '{"role": "user", "content": "Hello!"}'

_REQUEST_FIELDS = ("id", "prompt", "messages", "system_prompt", "num_samples")
_OPTION_FIELDS = tuple(field.name for field in fields(GenerationOptions))
_LINE_START = b'{"id": '


@dataclass(frozen=True)
class SampleTask:
    """The request of one line.

    Attributes:
        id: Its id; the number of the line if it has none.
        line: The number of the line, from 1.
        num_samples: How many texts it asks for.
        pending: The numbers of the samples without a result.
        request: What to generate.
        has_own_seed: Whether the seed of its options is used as it is, not a derived one.
        digest: 12 hexadecimal digits over all that determines its texts except for the id: model, prompt, options, and
            where the seeds come from.
    """

    id: Id
    line: int
    num_samples: int
    pending: list[int]
    request: Request
    has_own_seed: bool
    digest: str

    def pending_samples(self) -> Iterator[Sample]:
        """The samples without a result, with their seeds."""
        for number in self.pending:
            yield Sample(self, number, self.request if self.has_own_seed else self.request.sample(str(self.id), number))


class Sample(NamedTuple):
    """One text of a line to generate: sample `number`, from 0."""

    task: SampleTask
    number: int
    request: Request


class BadRequest(GenerationError):
    """A line that can't be served.

    Attributes:
        line: The number of the line.
        id: The id of the request; None if none could be read.
    """

    def __init__(self, line: int, id: Id | None, message: str, hint: str | None = None):
        super().__init__(message, hint)
        self.line = line
        self.id = id


class RequestReader:
    """Parses lines in order and checks that their ids are unique.

    A request has "prompt" (text or a list of token ids) or "messages" (with "role" and "content" each). It may have
    "id" (a string or a number, compared as text), "system_prompt", "num_samples", and any field of GenerationOptions
    to replace the default.

    The seed of a sample is `derive_seed(seed, id, sample)` with the default seed, or 0. A request with its own seed
    uses it unchanged for a single sample, and derives the seeds of several samples from it. So a seed depends only on
    the request.
    """

    def __init__(
        self,
        lm: LoadedModel,
        defaults: GenerationOptions,
        prompt_encoder: PromptEncoder,
        *,
        kv: KVOptions | None = None,
        num_samples: int = 1,
        done: Callable[[Id, int], str | None] = lambda id, sample: None,
    ):
        """Prepare to read requests for a model.

        Args:
            lm: The model.
            defaults: Options of requests that don't set them.
            prompt_encoder: Encodes prompts and messages.
            kv: Options of the key-value cache.
            num_samples: The default number of samples.
            done: `done(id, sample)` is the digest of the request whose result exists; None without a result.
        """
        setup = (fingerprint(lm.model), lm.tokenizer.fingerprint, asdict(kv or KVOptions()))
        self._setup_hash = hashlib.sha256(json.dumps(setup).encode())
        self._defaults = replace(defaults, seed=0) if defaults.seed is None else defaults
        self._prompt_encoder = prompt_encoder
        self._num_samples = num_samples
        self._done = done
        self._line_of_id: dict[str, int] = {}

    def read(self, number: int, line: bytes) -> SampleTask:
        """Parse the request on line `number`, which isn't blank.

        Raises:
            BadRequest: For a request that can't be served.
            GenerationError: If the results under its id are those of another request.
        """
        request_id: Id | None = None
        try:
            value = _parse_line(number, line)
            request_id = _check_id(value.get("id", number))
            self._check_unique(request_id, number)
            num_samples = _check_num_samples(value.get("num_samples", self._num_samples))
            options = self._options(value)
            prompt, eos_token_ids = self._prompt_encoder.encode(value)
        except MlxlmError as error:
            raise BadRequest(number, request_id, error.message, error.hint) from error
        has_own_seed = value.get("seed") is not None and num_samples == 1
        request = Request(prompt, options, eos_token_ids)
        digest = self._digest(request, has_own_seed)
        results = [self._done(request_id, sample) for sample in range(num_samples)]
        if any(result not in (None, digest) for result in results):
            raise GenerationError(
                f"line {number}: the results for the id {json.dumps(request_id)} are those of another request",
                "the prompt, options and model of those results, or another file of results",
            )
        pending = [sample for sample, result in enumerate(results) if result is None]
        return SampleTask(request_id, number, num_samples, pending, request, has_own_seed, digest)

    def _digest(self, request: Request, has_own_seed: bool) -> str:
        def plain(value: Any) -> Any:  # 1 and 1.0 are the same option
            return int(value) if isinstance(value, float) and value.is_integer() else value

        # Without defaults: results stay valid when there are new options.
        options = non_default_fields(request.options, GenerationOptions())
        options = {name: plain(value) for name, value in options.items()}
        if bias := options.get("logit_bias"):
            options["logit_bias"] = {token: plain(value) for token, value in bias.items()}
        eos_token_ids = None if request.eos_token_ids is None else sorted(request.eos_token_ids)
        digest = self._setup_hash.copy()
        digest.update(json.dumps([request.prompt, options, eos_token_ids, has_own_seed], sort_keys=True).encode())
        return digest.hexdigest()[:12]

    def _check_unique(self, request_id: Id, number: int) -> None:
        first = self._line_of_id.setdefault(str(request_id), number)
        if first != number:
            raise GenerationError(f"line {first} has the id {json.dumps(request_id)}, too", "an id for each request")

    def _options(self, value: dict[str, Any]) -> GenerationOptions:
        unknown = [name for name in value if name not in (*_REQUEST_FIELDS, *_OPTION_FIELDS)]
        if unknown:
            raise GenerationError("there is no field " + ", ".join(map(json.dumps, unknown)), _similar_fields(unknown))
        options = {name: value[name] for name in _OPTION_FIELDS if name in value}
        if options.get("choice") == []:
            raise GenerationError("choice is an empty list", 'one text or more, or no "choice"')
        if options.get("seed", ...) is None:
            del options["seed"]
        return replace(self._defaults, **options)


def _parse_line(number: int, line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise GenerationError(f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB", "a shorter prompt")
    content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    value = parse_json_object(content, "the line", GenerationError, '{"prompt": "Once upon a time"}')
    if b"\\u" in line:  # escaped surrogates are the only way to text that isn't UTF-8
        check_unicode(json.dumps(value, ensure_ascii=False))
    return value


def _check_id(value: Any) -> Id:
    if isinstance(value, bool) or not isinstance(value, Id):
        raise GenerationError("the id is neither a string nor a number", "one, or none for the number of the line")
    return value


def _check_num_samples(value: Any) -> int:
    if not is_int_at_least(value, 1) or value > MAX_NUM_SAMPLES:
        raise GenerationError(f"num_samples is {value!r}", f"a whole number from 1 to {MAX_NUM_SAMPLES}")
    return value


def _similar_fields(unknown: list[str]) -> str:
    """A hint for unknown field names."""
    known = (*_REQUEST_FIELDS, *_OPTION_FIELDS)
    names = (name.lower().replace("-", "_") for name in unknown)
    similar = [match for name in names for match in difflib.get_close_matches(name, known, n=1)]
    return ", ".join(similar) or f"{', '.join(_REQUEST_FIELDS)}, or an option, such as max_tokens"


class PromptEncoder:
    """Encodes the prompts and messages of requests."""

    def __init__(
        self,
        lm: LoadedModel,
        encode_messages: Callable[[Messages], EncodedPrompt],
        *,
        as_chat: bool = False,
        system_prompt: str | None = None,
    ):
        """Encode for a model.

        Args:
            lm: The model.
            encode_messages: Applies the chat template. May raise any MlxlmError.
            as_chat: Whether a text prompt is a user message.
            system_prompt: The default system prompt of conversations.
        """
        self._lm = lm
        self._encode_messages = encode_messages
        self._as_chat = as_chat
        self._system_prompt = system_prompt

    def encode(self, value: dict[str, Any]) -> EncodedPrompt:
        """Encode "prompt" or "messages", and "system_prompt", of a request. Raises GenerationError for invalid ones."""
        prompt, messages, system_prompt = (value.get(name) for name in ("prompt", "messages", "system_prompt"))
        if (prompt is None) == (messages is None):
            raise GenerationError("a request has either a prompt or messages", '{"prompt": "Once upon a time"}')
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise GenerationError("system_prompt is not a string", '"Be brief."')
        if messages is None:
            is_chat = self._as_chat and isinstance(prompt, str)
            if not self._as_chat and (system_prompt is not None or self._system_prompt):
                raise GenerationError("a prompt without a chat can't have a system prompt", "messages, or --chat")
            if not is_chat:
                return self._encode_prompt(prompt), None
            if not prompt:
                raise GenerationError("the message is empty", "some text to answer")
            messages = [{"role": "user", "content": prompt}]
        return self._encode_messages(self._with_system_prompt(_check_messages(messages), system_prompt))

    def _encode_prompt(self, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            return encode_prompt(self._lm, prompt)
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not is_ids or self._as_chat:
            raise GenerationError("the prompt is not a string", "a string; or without a chat, a list of token ids")
        return prompt  # `run_batch` checks whether the model has these ids

    def _with_system_prompt(self, messages: Messages, system_prompt: str | None) -> Messages:
        has_system_prompt = messages[0]["role"] == "system"
        if system_prompt is not None and has_system_prompt:
            raise GenerationError(
                "there are two system prompts", "system_prompt, or a first message with the role system"
            )
        system_prompt = self._system_prompt if system_prompt is None else system_prompt
        if system_prompt and not has_system_prompt:
            return [{"role": "system", "content": system_prompt}, *messages]
        return messages


def _check_messages(messages: Any) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise GenerationError("messages is not a list of messages", f"[{EXAMPLE_MESSAGE}]")
    for number, message in enumerate(messages, 1):
        check_message(number, message)
    check_is_question(messages[-1]["role"])
    return messages


def check_message(number: int, message: Any) -> None:
    """Raise GenerationError if message `number`, from 1, isn't a role and a text."""
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise GenerationError(f"message {number} must have a role and a content, nothing else", EXAMPLE_MESSAGE)
    if message["role"] not in _ROLES:
        raise GenerationError(f"message {number} has the role {message['role']!r}", "one of " + ", ".join(_ROLES))
    if not isinstance(message["content"], str):
        raise GenerationError(f"the content of message {number} is not a string", EXAMPLE_MESSAGE)


def check_is_question(role: str) -> None:
    """Raise GenerationError if the last message, of this role, can't be answered."""
    if role not in ("user", "tool"):
        raise GenerationError(
            "the last message is not the user's: there is nothing to answer", f"{EXAMPLE_MESSAGE} last"
        )


def result_fields(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a result that are equal in two equal runs."""
    values: dict[str, Any] = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tokens": len(result.tokens),
        "prompt_tokens": result.prompt_tokens,
        "seed": result.seed,
    }
    if result.logprobs is not None:
        values["logprobs"] = [_logprobs_fields(token, tokenizer) for token in result.logprobs]
    if result.constraint_error is not None:
        values["constraint_error"] = result.constraint_error
    return values


def full_result_fields(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """All fields of a result, timings included."""
    values = result_fields(result, tokenizer)
    values |= {"cached_tokens": result.cached_tokens, "timings": asdict(result.timings)}
    if result.speculation is not None:
        values["speculation"] = asdict(result.speculation)
    return values


def sample_fields(sample: Sample, result: GenerationResult | MlxlmError, tokenizer: Tokenizer) -> dict[str, Any]:
    """The line of a sample: id, number (if there are several), digest of the request, and the result or its error."""
    task = sample.task
    number = {"sample": sample.number} if task.num_samples > 1 else {}
    head = {"id": task.id} | number | {"request": task.digest}
    if isinstance(result, MlxlmError):
        return head | {"line": task.line, "error": describe_error(result)}
    return head | result_fields(result, tokenizer)


def bad_request_fields(error: BadRequest) -> dict[str, Any]:
    """The line for a request that can't be served."""
    return {"id": error.id, "line": error.line, "error": describe_error(error)}


def has_failed(fields: dict[str, Any]) -> bool:
    """Whether a line is an error or an incomplete constrained text, which a later run tries again."""
    return "error" in fields or "constraint_error" in fields


def _logprobs_fields(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    values = _logprob_fields(logprobs, tokenizer)
    if logprobs.top_logprobs:
        values["top_logprobs"] = [_logprob_fields(entry, tokenizer) for entry in logprobs.top_logprobs]
    return values


def _logprob_fields(entry: TokenLogprob | TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    content = tokenizer.token_bytes(entry.token) if entry.bytes is None else entry.bytes
    return {
        "token": entry.token,
        "text": content.decode("utf-8", "replace"),
        "bytes": None if entry.bytes is None else list(entry.bytes),
        # float32 has no more digits. JSON has no infinity: None is a token that the model rules out.
        "logprob": round(entry.logprob, 6) if math.isfinite(entry.logprob) else None,
    }


class ResultFile:
    """A file of result lines that stays readable after a crash.

    Opening only reads. The first `write` removes failed results, which are tried again, and a torn last line, which a
    crash, a full disk or a power cut can leave, by replacing the file. New lines are appended.
    """

    def __init__(self, path: Path | str):
        """Open a file, or create it.

        Raises:
            GenerationError: For a file with other content, one that another process is writing, and OS errors.
        """
        self._path = Path(path).resolve()
        self._descriptors: list[int] = []  # the last one is written to
        self._done: dict[tuple[str, int], str] = {}
        self._intact = True  # whether all lines are complete, and results that succeeded
        try:
            with os_errors_as(GenerationError, "write", path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._is_new = not self._path.exists()
                if not (self._is_new or self._path.is_file()):
                    raise GenerationError(f"{self._path} is not a regular file", "the name of a new file")
                self._open()
                with self._path.open("rb") as file:
                    self._kept_lines: list[tuple[int, int]] = list(self._read(file))
        except BaseException:
            self.close()
            raise

    def done(self, id: Id, sample: int) -> str | None:
        """The digest of the request whose result for this sample was in the opened file; None without a result."""
        return self._done.get((str(id), sample))

    def write(self, line: bytes) -> None:
        """Append a line. After any exception, Ctrl-C included, the file ends with the line before.

        Raises:
            GenerationError: For OS errors, such as a full disk.
        """
        with os_errors_as(GenerationError, "write", self._path):
            if not self._intact:
                self._rewrite()
            descriptor, rest = self._descriptors[-1], memoryview(line)
            size = os.fstat(descriptor).st_size
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except BaseException:
                os.ftruncate(descriptor, size)
                raise

    def close(self) -> None:
        """Close the file, and remove it if it is new and empty."""
        if self._descriptors and self._is_new and os.fstat(self._descriptors[-1]).st_size == 0:
            self._path.unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network drives have no locks, and fail with other errors.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise GenerationError(f"another process is writing {self._path}", "one process per file") from None

    def _read(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Yield start and end of every result that succeeded."""
        start = 0
        for number, line in enumerate(file, 1):
            fields = self._parse(line)
            if fields is None and (line.endswith(b"\n") or not _is_torn(line)):
                raise GenerationError(
                    f"line {number} of {self._path} is not a result, and the file stays as it is",
                    "the name of a new file, or of one that this command wrote",
                )
            if fields is None or has_failed(fields):
                self._intact = False
            else:
                self._done[str(fields["id"]), fields.get("sample", 0)] = fields["request"]
                self._intact = self._intact and line.endswith(b"\n")
                yield start, start + len(line)
            start += len(line)

    @staticmethod
    def _parse(line: bytes) -> dict[str, Any] | None:
        with suppress(GenerationError):
            value = parse_json_object(line, "the line", GenerationError, "a result")
            if "id" in value and ("error" in value or _has_text(value)):
                return value
        return None

    def _rewrite(self) -> None:
        """Replace the file by its results, without failed ones and a torn last line."""
        with self._path.open("rb") as file, atomic_write(self._path, GenerationError) as copy:
            os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            for start, end in self._kept_lines:
                file.seek(start)
                copy.write(file.read(end - start).rstrip(b"\n") + b"\n")
        self._open()  # the old descriptor keeps its lock, for a process that has opened the replaced file
        self._intact = True


def _has_text(value: dict[str, Any]) -> bool:
    return "text" in value and isinstance(value.get("request"), str) and type(value.get("sample", 0)) is int


def _is_torn(line: bytes) -> bool:
    """Whether a last line without a line end is the beginning of a result, or zeros, as after a power cut."""
    return line[: len(_LINE_START)] == _LINE_START[: len(line)] or not line.strip(b"\0")
