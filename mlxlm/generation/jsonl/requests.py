"""Lines of requests as texts to generate. One line, one JSON object, which is checked whole."""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from mlxlm.cache import KVOptions, fingerprint
from mlxlm.cache.options import is_int_at_least
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.request_queue import Request
from mlxlm.generation.stream_generate import encode_prompt
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError
from mlxlm.utils.json_files import parse_json_object

MAX_LINE_BYTES = 64 * 2**20  # bytes: far above any context, far below what memory holds

Id = str | int | float
Messages = list[dict[str, str]]  # each with "role" and "content"
EncodedPrompt = tuple[list[int], frozenset[int]]  # ids, and the tokens that end the answer

_OWN_FIELDS = ("id", "prompt", "messages", "system", "num_samples")
_OPTIONS = tuple(field.name for field in fields(GenerationOptions))
_ROLES = ("system", "user", "assistant")
_MESSAGE = '{"role": "user", "content": "Hello!"}'


@dataclass(frozen=True)
class Sample:
    """One text to generate: number `number` (from 0) of the `num_samples` that the request on line `line` asks for.
    `digest`: that of Task."""

    id: Id
    line: int
    number: int
    num_samples: int
    request: Request
    digest: str


@dataclass(frozen=True)
class SampleTask:
    """The request on line `line`: `num_samples` texts, of which those numbered in `pending` are wanted.

    has_own_seed: it is drawn with the seed of its options, not with one derived from it. digest: 12 hexadecimal digits
    over all that decides its texts but its id: model, prompt, options, and where its seeds come from.
    """

    id: Id
    line: int
    num_samples: int
    pending: list[int]
    request: Request
    has_own_seed: bool
    digest: str

    def wanted(self) -> Iterator[Sample]:
        for number in self.pending:
            request = self.request if self.has_own_seed else self.request.sample(str(self.id), number)
            yield Sample(self.id, self.line, number, self.num_samples, request, self.digest)


class BadRequest(GenerationError):
    """A line that can't be served; `id` is None where none could be read."""

    def __init__(self, line: int, id: Id | None, message: str, hint: str | None = None):
        super().__init__(message, hint)
        self.line = line
        self.id = id


class RequestReader:
    """Turns lines into tasks, one after another: it knows the ids that were there before.

    A request has "prompt" (a text, or a list of token ids) or "messages" ({"role", "content"} each), and may
    have "id" (a string or a number; without one it is the number of its line), "system", "samples" and any
    field of GenerationOptions, which then counts instead of `defaults`. Ids are compared as texts.

    A sample's seed is `derived_seed(seed, id, sample)` with the seed of `defaults` (0 if it has none); a request
    with a seed of its own is drawn with that very seed, or if it asks for several samples, with those derived
    from it. So it depends on nothing but the request.
    """

    def __init__(
        self,
        lm: LoadedModel,
        defaults: GenerationOptions,
        encode_messages: Callable[[Messages], EncodedPrompt],
        *,
        kv: KVOptions | None = None,
        num_samples: int = 1,
        as_chat: bool = False,
        system_prompt: str | None = None,
        done: Callable[[Id, int], str | None] = lambda id, sample: None,
    ):
        """`kv`: how keys and values will be kept. `as_chat`: a prompt in text is asked as a message. `system_prompt`: of
        conversations that name none. `done(id, sample)`: the digest of a sample that isn't needed, as it is done.
        `encode_messages` may raise any MlxlmError."""
        self._loaded = lm
        made_with = (fingerprint(lm.model), lm.tokenizer.fingerprint, asdict(kv or KVOptions()))
        self._made_with = hashlib.sha256(json.dumps(made_with).encode())
        self._defaults = replace(defaults, seed=0) if defaults.seed is None else defaults
        self._encode_messages = encode_messages
        self._samples = num_samples
        self._as_messages = as_chat
        self._system = system_prompt
        self._done = done
        self._line_of: dict[str, int] = {}

    def read(self, number: int, line: bytes) -> SampleTask:
        """The request on line `number`, which is not blank. Raises BadRequest; and GenerationError where what is done
        under its id is another request."""
        request_id: Id | None = None
        try:
            if len(line) > MAX_LINE_BYTES:
                raise GenerationError(f"the line is longer than {MAX_LINE_BYTES // 2**20} MiB", "a shorter prompt")
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            value = parse_json_object(content, "the line", GenerationError, '{"prompt": "Once upon a time"}')
            if b"\\u" in line:
                check_unicode(json.dumps(value, ensure_ascii=False))
            request_id = _checked_id(value.get("id", number))
            self._remember(request_id, number)
            num_samples = _checked_num_samples(value.get("num_samples", self._samples))
            options = self._options(value)
            prompt, eos_token_ids = self._encode(value)
        except MlxlmError as error:
            raise BadRequest(number, request_id, error.message, error.hint) from error
        has_own_seed = value.get("seed") is not None and num_samples == 1
        request = Request(prompt, options, eos_token_ids)
        digest = self._digest(request, has_own_seed)
        done = [self._done(request_id, n) for n in range(num_samples)]
        if any(found not in (None, digest) for found in done):
            raise GenerationError(
                f"line {number}: what is done with the id {json.dumps(request_id)} is the result of another request",
                "the prompt, options and model that it was made with, or another file of results",
            )
        pending = [n for n, found in enumerate(done) if found is None]
        return SampleTask(request_id, number, num_samples, pending, request, has_own_seed, digest)

    def _digest(self, request: Request, has_own_seed: bool) -> str:
        def plain(value: Any) -> Any:  # 1 and 1.0 are one setting
            return int(value) if isinstance(value, float) and value.is_integer() else value

        options = {name: plain(getattr(request.options, name)) for name in _OPTIONS}
        options["logit_bias"] = {token: plain(bias) for token, bias in request.options.logit_bias.items()}
        ends = None if request.eos_token_ids is None else sorted(request.eos_token_ids)
        digest = self._made_with.copy()
        digest.update(json.dumps([request.prompt, options, ends, has_own_seed], sort_keys=True).encode())
        return digest.hexdigest()[:12]

    def _remember(self, request_id: Id, number: int) -> None:
        first = self._line_of.setdefault(str(request_id), number)
        if first != number:
            raise GenerationError(f"line {first} has the id {json.dumps(request_id)}, too", "an id for each request")

    def _options(self, value: dict[str, Any]) -> GenerationOptions:
        unknown = [name for name in value if name not in (*_OWN_FIELDS, *_OPTIONS)]
        if unknown:
            raise GenerationError("there is no field " + ", ".join(map(json.dumps, unknown)), _meant(unknown))
        given = {name: value[name] for name in _OPTIONS if name in value}
        if given.get("choice") == []:
            raise GenerationError("choice is an empty list", 'one text or more, or no "choice"')
        if given.get("seed", ...) is None:
            del given["seed"]
        return replace(self._defaults, **given)

    def _encode(self, value: dict[str, Any]) -> tuple[Sequence[int], frozenset[int] | None]:
        prompt, messages, system_prompt = (value.get(name) for name in ("prompt", "messages", "system"))
        if (prompt is None) == (messages is None):
            raise GenerationError("a request has either a prompt or messages", '{"prompt": "Once upon a time"}')
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise GenerationError("system is not a text", '"Be brief."')
        continued = messages is None and not self._as_messages
        if continued and (system_prompt is not None or self._system):
            raise GenerationError("a prompt that is continued has no system prompt", "messages, or --chat")
        if messages is None and not isinstance(prompt, str):
            return self._token_ids(prompt), None
        if continued:
            return encode_prompt(self._loaded, prompt), None
        if messages is None and not prompt:
            raise GenerationError("the message is empty", "some text to answer")
        messages = _checked_messages([{"role": "user", "content": prompt}] if messages is None else messages)
        has_system = messages[0]["role"] == "system"
        if system_prompt is not None and has_system:
            raise GenerationError("there are two system prompts", "system, or a first message of role system")
        system_prompt = self._system if system_prompt is None else system_prompt
        if system_prompt and not has_system:
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return self._encode_messages(messages)

    def _token_ids(self, prompt: Any) -> list[int]:
        whole = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not whole or self._as_messages:
            raise GenerationError("the prompt is no text", "a string; or without a chat, a list of token ids")
        return prompt  # whether the model has such tokens is checked by `run_batch`


def _checked_id(value: Any) -> Id:
    if isinstance(value, bool) or not isinstance(value, Id) or isinstance(value, float) and not math.isfinite(value):
        raise GenerationError("the id is neither a string nor a number", "one, or none for the number of the line")
    return value


def _checked_num_samples(value: Any) -> int:
    if not is_int_at_least(value, 1) or value > 100_000:
        raise GenerationError(f"num_samples is {value!r}", "a whole number from 1 to 100000")
    return value


def _checked_messages(messages: Any) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise GenerationError("messages is not a list of messages", f"[{_MESSAGE}]")
    for n, message in enumerate(messages, 1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise GenerationError(f"message {n} doesn't consist of a role and a content", _MESSAGE)
        if message["role"] not in _ROLES:
            raise GenerationError(f"message {n} has the role {message['role']!r}", "one of " + ", ".join(_ROLES))
        if not isinstance(message["content"], str):
            raise GenerationError(f"the content of message {n} is not a text", _MESSAGE)
    if messages[-1]["role"] != "user":
        raise GenerationError("the last message is not the user's: there is nothing to answer", f"{_MESSAGE} last")
    return messages


def _meant(unknown: list[str]) -> str:
    """What the writer of these names may have meant."""
    known = (*_OWN_FIELDS, *_OPTIONS)
    near = [m for name in unknown for m in difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)]
    return ", ".join(near) or f"{', '.join(_OWN_FIELDS)}, or an option, such as max_tokens"
