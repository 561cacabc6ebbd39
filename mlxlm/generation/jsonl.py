"""JSONL: requests as lines of JSON. Their results are in `jsonl_results`.

A request asks for one or more texts. Its prompt is a text, token ids, or the messages of a chat.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from mlxlm.cache import KVOptions, fingerprint
from mlxlm.config.numbers import is_int_at_least
from mlxlm.config.option import non_default_fields
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.request import Request, encode_prompt
from mlxlm.generation.sampling_functions import SamplingFunctions
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError
from mlxlm.utils.json_files import parse_json_object

MAX_LINE_BYTES = 64 * 2**20  # far more than any context, far less than memory
MAX_NUM_SAMPLES = 100_000

Id = str | int | float
Messages = list[dict[str, str]]  # each with "role" and "content"


class EncodedPrompt(NamedTuple):
    """An encoded prompt, with what its text needs.

    Attributes:
        ids: The prompt.
        eos_token_ids: See `Request`.
        skip_special_tokens: See `Request`.
        start_of_answer: What follows the prompt if the text is constrained, so that it doesn't begin with reasoning.
    """

    ids: Sequence[int]
    eos_token_ids: frozenset[int] | None = None
    skip_special_tokens: bool = True
    start_of_answer: Sequence[int] = ()

    def request(self, options: GenerationOptions, functions: SamplingFunctions | None = None) -> Request:
        """Return the request for a text."""
        prompt = [*self.ids, *self.start_of_answer] if options.constraint and self.start_of_answer else self.ids
        skip = self.skip_special_tokens
        return Request(prompt, options, self.eos_token_ids, functions=functions, skip_special_tokens=skip)


_ROLES = ("system", "user", "assistant")
EXAMPLE_MESSAGE = '{"role": "user", "content": "Hello!"}'

_REQUEST_FIELDS = ("id", "prompt", "messages", "system_prompt", "num_samples")
_OPTION_FIELDS = tuple(field.name for field in fields(GenerationOptions))


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
            encoded = self._prompt_encoder.encode(value)
        except MlxlmError as error:
            raise BadRequest(number, request_id, error.message, error.hint) from error
        has_own_seed = value.get("seed") is not None and num_samples == 1
        request = encoded.request(options)
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
                return EncodedPrompt(self._encode_prompt(prompt))
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
