"""The body of a request: read within limits of size, time and nesting, and checked; fields that several APIs share.

Clients send fields of other servers, too. Other names for our options are translated, see `NAMES` and `VALUES`; a field
that would change the text, and that this server doesn't have, is refused, see `UNSUPPORTED`; any other unknown field is
ignored, and logged once, or refused by a strict server.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import Field as DataclassField
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from mlxlm.config.option import declaration, options_of, types_of
from mlxlm.generation import GenerationOptions
from mlxlm.server.errors import ApiError, invalid
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line
from mlxlm.utils.json_files import parse_json_object

logger = logging.getLogger("mlxlm.server")

MAX_BODY_BYTES = 16 << 20  # far more text than fits into any context
BODY_TIMEOUT = 30.0  # seconds
MAX_DEPTH = 64  # of nested objects and arrays
MAX_MESSAGES = 10_000
MAX_PROMPTS = 2048
MAX_N = 128
MAX_TOOLS = 128
_MAX_STOP_STRINGS = 64
_MAX_STOP_TOKENS = 1024
_MAX_LOGGED = 1000  # names of unknown fields

# Names that other servers, or other APIs of this one, have for our fields, wherever an object has such a field.
NAMES = {
    "max_completion_tokens": "max_tokens",  # chat completions
    "max_output_tokens": "max_tokens",  # the Responses API
    "num_predict": "max_tokens",  # ollama
    "n_predict": "max_tokens",  # llama.cpp
    "max_new_tokens": "max_tokens",  # transformers
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",  # Anthropic
    "random_seed": "seed",  # Mistral
    "repeat_penalty": "repetition_penalty",  # ollama, llama.cpp
    "repeat_last_n": "repetition_context_size",  # ollama, llama.cpp
    "typical": "typical_p",  # llama.cpp
    "guided_json": "json_schema",  # vLLM, whose structured_outputs.json is guided_json, and so on
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "reasoning": "reasoning_content",  # of a message: OpenRouter, vLLM
    "thinking": "reasoning_content",  # of a message: ollama
    "tool_name": "name",  # of a result: ollama
}

# Values that other servers have for ours. None: as if the field were missing.
VALUES: dict[str, dict[float, Any]] = {
    "max_tokens": {-2: -1},  # -1: no limit but the context
    "seed": {-1: None},
    "top_k": {-1: 0},
    "top_p": {0: 1e-6},  # only the most likely token
    "repetition_penalty": {0: 1.0},
    "repetition_context_size": {-1: 1 << 14},
    "dry_penalty_last_n": {-1: 1 << 14},
}

# Fields that this server doesn't have and that would change the text, with their value that has no effect, besides
# false, 0 and empty ones.
UNSUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("n", "best_of", "num_beams", "use_beam_search", "length_penalty"), 1),
    **dict.fromkeys(("tfs_z", "guidance_scale", "encoder_repetition_penalty"), 1),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dynatemp_range", "top_a", "smoothing_factor", "penalty_alpha")),
    **dict.fromkeys(("no_repeat_ngram_size", "negative_prompt", "bad_words", "allowed_token_ids")),
    **dict.fromkeys(("guided_json_object", "guided_structural_tag", "guided_whitespace_pattern")),
    **dict.fromkeys(("echo", "suffix", "prompt", "conversation", "background", "chat_template", "documents")),
    **dict.fromkeys(("images", "template", "mcp_servers", "include_stop_str_in_output", "logits_processors", "lora")),
}

# Fields of the APIs that don't change the text, or that clients send back from an answer. They aren't worth a line in
# the log, and a strict server accepts them, too.
WITHOUT_EFFECT = frozenset(
    # OpenAI's accounting, storage and speed.
    ["user", "metadata", "store", "service_tier", "safety_identifier", "prediction", "client_metadata"]
    + ["prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "include_obfuscation", "max_tool_calls"]
    # Answers that are sent back.
    + ["id", "index", "status", "phase", "annotations", "provider_specific_fields", "reasoning_details"]
    + ["audio", "encrypted_content", "signature", "data", "citations", "caller"]
    # The model decides how long it reasons, all of it is returned, and there are no summaries.
    + ["summary", "generate_summary", "budget_tokens", "display"]
    # Prompts are always cached, arguments always streamed, and all tools are in the prompt.
    + ["cache_control", "cache_prompt", "eager_input_streaming", "defer_loading", "input_examples", "inference_geo"]
    # The context is always the model's.
    + ["num_ctx", "timings_per_token", "guided_decoding_backend"]
)


Body = TypeVar("Body", bound="Fields")


class Fields(BaseModel):
    """Base class of the objects in a request: strict types, and no NaN. Unknown fields are in `model_extra`."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    @property
    def is_left_out(self) -> bool:
        """Whether it has a `type` that this server has no use for, such as a tool that only another server runs."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _translate(cls, value: Any) -> Any:
        """Translate other names and values to ours. A null is like a missing field, and 5.0 is a whole number."""
        if not isinstance(value, dict):
            return value
        translated: dict[str, Any] = {}
        given_as: dict[str, str] = {}
        renamed = _renamed(cls)
        for given, item in _flattened(value):
            name = renamed.get(given, given)
            if type(item) in (int, float):
                item = VALUES.get(name, {}).get(item, item)
            if type(item) is float and item.is_integer() and abs(item) < 2**53:
                item = int(item)
            if item is None:
                continue
            if translated.setdefault(name, item) != item:
                raise invalid(f"{given_as[name]} and {given} differ (try: one of them)", given)
            given_as[name] = given
        return translated


@cache
def _renamed(model: type[Fields]) -> dict[str, str]:
    """The entries of `NAMES` for fields that a model has."""
    return {given: name for given, name in NAMES.items() if name in model.model_fields}


def _flattened(value: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a request, with those of vLLM's `structured_outputs` under their earlier names."""
    for name, item in value.items():
        if name == "structured_outputs" and isinstance(item, dict):
            yield from ((f"guided_{key}", part) for key, part in item.items())
        else:
            yield name, item


class UnknownFields:
    """What happens to unknown fields of requests. See the top of this file.

    Args:
        strict: Refuse a field that would be ignored.
    """

    def __init__(self, strict: bool = False):
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, body: Fields, endpoint: str) -> None:
        """Check the unknown fields of a request. Raises ApiError for one that isn't ignored."""
        for owner, path, item in _unknown(body):
            name = path.rpartition(".")[2]
            if name in WITHOUT_EFFECT:
                continue
            if name in UNSUPPORTED:
                if item and item != UNSUPPORTED[name]:
                    raise invalid(f"{path} isn't supported (try: without it)", path, "unsupported_parameter")
                continue
            if not self._strict and (path in self._logged or len(self._logged) >= _MAX_LOGGED):
                continue
            names = [*type(owner).model_fields, *NAMES]
            similar = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.8)
            hint = f" (did you mean {similar[0]}?)" if similar else ""
            if self._strict:
                raise invalid(f"there is no parameter {path}{hint}", path, "unknown_parameter")
            self._logged.add(path)
            logger.info("ignoring the parameter %s of %s%s", one_line(path), endpoint, hint)


def _unknown(value: Fields, path: str = "") -> Iterator[tuple[Fields, str, Any]]:
    """The unknown fields of an object and those inside it: their object, path without indices, and value.

    An object that is left out counts as a field, type=TYPE.
    """
    if value.is_left_out:
        kind = vars(value)["type"]
        yield value, f"{path}type={kind[:100]}", kind
        return
    for name, item in (value.model_extra or {}).items():
        yield value, f"{path}{name[:100]}", item
    for name, item in vars(value).items():
        for part in item if isinstance(item, list) else [item]:
            if isinstance(part, Fields):
                yield from _unknown(part, f"{path}{name}.")


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _without_empty(value: Any) -> Any:
    return [text for text in value if text != ""] if isinstance(value := _as_list(value), list) else value


_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", None)


def text_of_part(part: Any, n: int) -> str:
    """The text of a part of some content.

    Args:
        part: A text, a refusal, a document in plain text, a search result, or the name of a tool.
        n: Its number, for the error.

    Raises:
        PydanticCustomError: It isn't text.
    """
    fields: dict[str, Any] = part if isinstance(part, dict) else {}
    kind, source = fields.get("type"), fields.get("source")
    texts: list[Any] = [None]
    if kind in _TEXT_PARTS:
        texts = [fields.get("text")]
    elif kind in ("refusal", "tool_reference"):
        texts = [fields.get("refusal" if kind == "refusal" else "tool_name")]
    elif kind == "search_result":
        texts = [fields.get("title") or "", source or "", join_text_parts(fields.get("content"))]
    elif kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        content = source.get("data") if source["type"] == "text" else join_text_parts(source.get("content"))
        texts = [fields.get("title") or "", fields.get("context") or "", content]
    elif isinstance(part, dict):
        shown = kind[:40] if isinstance(kind, str) else "unknown"
        problem = "part {n} is of the type {kind}, and this server only reads text"
        raise PydanticCustomError("text_part", problem, {"n": n, "kind": shown})
    if not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("text_part", "part {n} has no text", {"n": n})
    return "\n".join(text for text in texts if text or len(texts) == 1)


def join_text_parts(content: Any) -> Any:
    """Join content that is a list of text parts to one text, with line breaks."""
    if not isinstance(content, list):
        return content
    return "\n".join(text_of_part(part, n) for n, part in enumerate(content))


def _as_json(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


Schema = dict[str, Any] | bool | str | None
Strings = Annotated[list[str], BeforeValidator(_without_empty), Field(max_length=_MAX_STOP_STRINGS)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MAX_STOP_TOKENS)]
JsonText = Annotated[str, BeforeValidator(_as_json)]  # an object as text; some clients send it as it is
TextContent = Annotated[str, BeforeValidator(join_text_parts)]


def _type_of(field: DataclassField[Any]) -> Any:
    """The type of an option in a request, None included."""
    limit = Field(max_length=declaration(field).max_items)
    match types_of(field)[0]:
        case "tuple[str, ...]":
            return Annotated[list[str], BeforeValidator(_as_list), limit] | None
        case "Mapping[int, float]":
            return Annotated[dict[str, float], limit] | None
        case kind:
            return Schema if field.name == "json_schema" else _TYPES[kind] | None


_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_definitions: dict[str, Any] = {
    name: (_type_of(field), None)
    for name, field in options_of(GenerationOptions).items()
    if name != "logprobs"  # which each API has in its own way
} | {"stop": (Strings | None, None)}
_OptionFields = create_model("_OptionFields", __base__=Fields, **_definitions)


class SamplingFields(_OptionFields):  # type: ignore[valid-type, misc]  # made from GenerationOptions
    """The fields of `GenerationOptions` that every request for text may set; None for the server's default.

    Attributes:
        ignore_eos: Whether the tokens that end the model's texts don't end this one.
        stop_token_ids: Further tokens that do.
    """

    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None

    def eos_token_ids(self, ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end the text. `ids`: those of the model."""
        return (frozenset() if self.ignore_eos else ids).union(self.stop_token_ids or ())

    def options(self, defaults: GenerationOptions, **others: Any) -> GenerationOptions:
        """The generation options of the request.

        Args:
            defaults: The options that it doesn't set.
            others: Options from fields that are specific to an API; None for the default.

        Raises:
            ApiError: For an invalid value.
        """
        values = {name: getattr(self, name) for name in _definitions} | others
        if values["choice"] == []:
            raise invalid("choice is an empty list (try: one text or more)", "choice")
        values = {name: value for name, value in values.items() if value is not None}
        if values.get("max_tokens") == -1:
            values["max_tokens"] = None
        try:
            return replace(defaults, **values)
        except GenerationError as error:
            raise invalid(str(error), option_in(error.message)) from None

    def schema_of_format(self, type: str, schema: Schema, field: str) -> Schema:
        """The JSON schema of the text: that of the API's own `field`, or else `json_schema`.

        Args:
            type: The field's type, "text", "json_object" or "json_schema".
            schema: The field's schema, if any.
            field: Its path in the request.

        Raises:
            ApiError: If the field lacks its schema, or the request has another constraint, too.
        """
        if type == "text":
            return self.json_schema
        if any(value is not None for value in (self.json_schema, self.regex, self.choice, self.grammar)):
            raise invalid(f"{field} and another constraint (try: one of them)", field)
        if type == "json_schema" and schema is None:
            raise invalid(f"{field} has no schema", field)
        return {"type": "object"} if schema is None else schema


class Reasoning(Fields):
    """`reasoning` of the Responses API and of OpenRouter."""

    effort: str | None = None
    enabled: bool | None = None


def _as_thinking(value: Any) -> Any:
    return {"type": "enabled" if value else "disabled"} if isinstance(value, bool) else value


class Thinking(Fields):
    """`thinking` of Anthropic's API and others."""

    type: Literal["enabled", "disabled", "adaptive"]


class TemplateFields(Fields):
    """Fields that become variables of the chat template, in the forms of all APIs. Most templates ignore them."""

    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None  # ollama's: also an effort
    thinking: Annotated[Thinking, BeforeValidator(_as_thinking)] | None = None
    reasoning: Reasoning | None = None

    def template_kwargs(self, effort: str | None = None, verbosity: str | None = None) -> dict[str, Any]:
        """The variables. `effort` and `verbosity`: those of a field that is specific to an API."""
        reasoning, thinking = self.reasoning or Reasoning(), self.thinking
        effort = effort or self.reasoning_effort or reasoning.effort
        enabled = self.enable_thinking
        if isinstance(self.think, str):
            effort = effort or self.think
        elif enabled is None:
            enabled = self.think
        if enabled is None and thinking is not None and thinking.type != "adaptive":
            enabled = thinking.type == "enabled"
        if enabled is None:
            enabled = False if effort == "none" else reasoning.enabled
        values = {"reasoning_effort": effort, "verbosity": verbosity or self.verbosity, "enable_thinking": enabled}
        given = {name: value for name, value in values.items() if value is not None}
        return given | (self.chat_template_kwargs or {})


def option_in(message: str) -> str | None:
    """The first option that the text of an error names."""
    names = [name for name in options_of(GenerationOptions) if re.search(rf"\b{name}\b", message)]
    return min(names, key=message.index, default=None)


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool | None = None


class ReplyFields(Fields):
    """The fields of a request for text that `respond` reads.

    Attributes:
        model: The name of the model.
        keep_alive: How long it stays loaded, see `Models.use`.
        stream: Whether to stream the answer.
    """

    model: str | None = None
    keep_alive: float | str | None = None
    stream: bool | None = None


class TextRequest(SamplingFields, ReplyFields):
    """The fields of every request for text whose options aren't in an object of their own."""


class ChoicesRequest(TextRequest):
    """The fields that chat completions and completions share."""

    n: int = Field(1, ge=1, le=MAX_N)
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


def _as_prompts(value: Any) -> Any:
    """A list of prompts, from one or several; a prompt is a text or a list of token ids."""
    is_ids = isinstance(value, list) and value and all(type(token) is int for token in value)
    return [value] if isinstance(value, str) or is_ids else value


def _check_prompt(value: Any) -> Any:
    if isinstance(value, str) or isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise PydanticCustomError("prompt", "a prompt is a text or a list of token ids")


Prompt = Annotated[Any, BeforeValidator(_check_prompt)]
Prompts = Annotated[list[Prompt], BeforeValidator(_as_prompts), Field(min_length=1, max_length=MAX_PROMPTS)]


async def read_body(request: Request, model: type[Body]) -> Body:
    """Read and validate the body of a request.

    Raises:
        ApiError: 400 for invalid JSON or fields, 408 for a slow body, 413 for a large one.
    """
    content = await _read_bytes(request)
    value = await asyncio.to_thread(_parse, content) if len(content) > 1 << 16 else _parse(content)
    try:
        body = model.model_validate(value)
    except ValidationError as error:
        raise _validation_error(error.errors(include_url=False, include_context=False)) from None
    except (OverflowError, RecursionError) as error:
        raise invalid(f"the request has a value that is too large: {error}") from None
    request.app.state.unknown_fields.check(body, request.url.path)
    return body


async def _read_bytes(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for chunk in request.stream():
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                chunks.append(chunk)
    except TimeoutError:
        message = f"the body of the request didn't arrive within {BODY_TIMEOUT:.0f} seconds"
        raise ApiError(408, message, headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(408, "the client closed the connection before it had sent its request") from None
    return b"".join(chunks)


def _too_large() -> ApiError:
    message = f"the body of the request has more than {MAX_BODY_BYTES >> 20} MiB"
    return ApiError(413, message, headers={"connection": "close"})


def _parse(content: bytes) -> dict[str, Any]:
    try:
        value = parse_json_object(content, "the body of the request", GenerationError, "a JSON object")
        _check_depth(value)
        if b"\\u" in content:  # only an escape can write a lone surrogate, which UTF-8 doesn't have
            check_unicode(json.dumps(value, ensure_ascii=False))
    except MlxlmError as error:
        raise invalid(str(error)) from None
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = chain.from_iterable(part.values() if isinstance(part, dict) else part for part in level)
        level = [item for item in parts if isinstance(item, dict | list)]
        if not level:
            return
    raise GenerationError(f"the body of the request has more than {MAX_DEPTH} levels of nesting", "fewer")


def _validation_error(problems: list[ErrorDetails]) -> ApiError:
    """A 400 for the first problem that pydantic reports, without the invalid value, which may be huge."""
    problem = problems[0]
    path = ".".join(str(part)[:100] for part in problem["loc"])
    if problem["type"] == "missing":
        return invalid(f"{path} is missing", path, "missing_required_parameter")
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:] if message.startswith("Input should") else message
    return invalid(f"{path}: {message.replace('input should', 'it should')}", path or None)
