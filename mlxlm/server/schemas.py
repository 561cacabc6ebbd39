"""The body of a request: read within limits of size, time and nesting, and checked; fields that several APIs share.

An unknown field is an error, since a client that sends one expects it to have an effect. Fields of OpenAI's API that
don't change the text are accepted and ignored: see `Fields.ignored`.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import re
from collections.abc import Set
from dataclasses import Field as DataclassField
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError
from starlette.requests import ClientDisconnect, Request

from mlxlm.config.option import declaration, options_of, types_of
from mlxlm.generation import GenerationOptions
from mlxlm.server.errors import ApiError, invalid
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError
from mlxlm.utils.json_files import parse_json_object

MAX_BODY_BYTES = 16 << 20  # far more text than fits into any context
BODY_TIMEOUT = 30.0  # seconds
MAX_DEPTH = 64  # of nested objects and arrays
MAX_MESSAGES = 10_000
MAX_PROMPTS = 2048
MAX_N = 128
MAX_TOOLS = 128
_MAX_STOP_STRINGS = 64


Body = TypeVar("Body", bound=BaseModel)


class Fields(BaseModel):
    """Base class of the objects in a request: strict types, no NaN, and no unknown fields unless they are null.

    Attributes:
        ignored: Fields that have no effect here; their values can be anything.
    """

    ignored: ClassVar[Set[str]] = frozenset()

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, value: Any) -> Any:
        """Drop ignored fields and nulls: some clients send every field they know, or send back what they received."""
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None and name not in cls.ignored}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_TEXT_PARTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal", None)


def _join_text_parts(content: Any) -> Any:
    """Join content that is a list of text parts to one text, with line breaks."""
    if not isinstance(content, list):
        return content
    texts = []
    for n, part in enumerate(content):
        fields = part if isinstance(part, dict) else {}
        kind = fields.get("type")
        if kind not in _TEXT_PARTS:
            shown = kind[:40] if isinstance(kind, str) else "unknown"
            problem = "part {n} is of the type {kind}, and this server only reads text"
            raise PydanticCustomError("text_part", problem, {"n": n, "kind": shown})
        text = fields.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise PydanticCustomError("text_part", "part {n} has no text", {"n": n})
        texts.append(text)
    return "\n".join(texts)


Schema = dict[str, Any] | bool | str | None
Strings = Annotated[list[str], BeforeValidator(_as_list), Field(max_length=_MAX_STOP_STRINGS)]
TextContent = Annotated[str, BeforeValidator(_join_text_parts)]


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
_BY_API = ("max_tokens", "stop", "logprobs")  # which each API has in its own way
_definitions: dict[str, Any] = {
    name: (_type_of(field), None) for name, field in options_of(GenerationOptions).items() if name not in _BY_API
}
_OptionFields = create_model("_OptionFields", __base__=Fields, **_definitions)


class SamplingFields(_OptionFields):  # type: ignore[valid-type, misc]  # made from GenerationOptions
    """The fields of `GenerationOptions` that every request for text may set; None for the server's default."""

    def options(self, defaults: GenerationOptions, **others: Any) -> GenerationOptions:
        """The generation options of the request.

        Args:
            defaults: The options that it doesn't set.
            others: Options from fields that are specific to an API; None for the default.

        Raises:
            ApiError: For an invalid value.
        """
        values = {name: getattr(self, name) for name in SamplingFields.model_fields} | others
        if values["choice"] == []:
            raise invalid("choice is an empty list (try: one text or more)", "choice")
        values = {name: value for name, value in values.items() if value is not None}
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
        return {"type": "object"} if type == "json_object" else schema


def option_in(message: str) -> str | None:
    """The first option that the text of an error names."""
    names = [name for name in options_of(GenerationOptions) if re.search(rf"\b{name}\b", message)]
    return min(names, key=message.index, default=None)


class StreamOptions(Fields):
    """`stream_options`."""

    ignored = {"include_obfuscation"}  # random padding that hides the lengths of tokens
    include_usage: bool | None = None


# Fields of OpenAI's API that are about its own accounting, storage and speed.
IGNORED_BY_OPENAI = {"user", "metadata", "store", "service_tier", "safety_identifier", "prediction"}
IGNORED_BY_OPENAI |= {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}


class ChoicesRequest(SamplingFields):
    """The fields that chat completions and completions share."""

    ignored = IGNORED_BY_OPENAI
    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    stop: Strings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None

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
        return model.model_validate(value)
    except ValidationError as error:
        raise _validation_error(error.errors(include_url=False, include_context=False), model) from None
    except (OverflowError, RecursionError) as error:
        raise invalid(f"the request has a value that is too large: {error}") from None


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


def _validation_error(problems: list[ErrorDetails], model: type[BaseModel]) -> ApiError:
    """A 400 for the first problem that pydantic reports, without the invalid value, which may be huge."""
    problem = problems[0]
    path = ".".join(str(part)[:100] for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        name = str(problem["loc"][-1])
        similar = difflib.get_close_matches(name[:100].lower(), model.model_fields, n=1) if path == name else []
        hint = f" (did you mean {similar[0]}?)" if similar else ""
        return invalid(f"there is no parameter {path}{hint}", path, "unknown_parameter")
    if problem["type"] == "missing":
        return invalid(f"{path} is missing", path, "missing_required_parameter")
    message = problem["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:] if message.startswith("Input should") else message
    return invalid(f"{path}: {message.replace('input should', 'it should')}", path or None)
