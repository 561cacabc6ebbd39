"""The fields of requests for completions and chat completions: those of OpenAI's API, and our own.

An unknown field is an error, since a client that sends one expects it to have an effect. Fields of OpenAI's API that
don't change the text are accepted and ignored: see `IgnoredFields`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field as DataclassField
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from mlxlm.config.option import declaration, options_of, types_of
from mlxlm.generation import GenerationOptions
from mlxlm.server.errors import invalid
from mlxlm.utils.errors import GenerationError

MAX_MESSAGES = 10_000
MAX_PROMPTS = 2048
MAX_N = 128
MAX_TOOLS = 128
_MAX_STOP_STRINGS = 64


class Fields(BaseModel):
    """Base class of the objects in a request: strict types, no NaN, and no unknown fields unless they are null."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Drop fields that are null: some clients send every field they know, or send back what they received."""
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


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
Text = Annotated[str, BeforeValidator(_join_text_parts)]


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

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # no effect: random padding that hides the lengths of tokens


class IgnoredFields(Fields):
    """Fields of OpenAI's API without effect here: they are about its own accounting, storage and speed."""

    user: str | None = None
    metadata: Mapping[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Mapping[str, Any] | None = None
    prediction: Mapping[str, Any] | None = None


class TextRequest(SamplingFields, IgnoredFields):
    """The fields that chat completions and completions share."""

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


class CompletionRequest(TextRequest):
    """The body of /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class JsonSchema(Fields):
    """The schema of `response_format`."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # no effect: the schema is always enforced


class ResponseFormat(Fields):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ToolFunction(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """An entry of `tools`."""

    type: Literal["function"]
    function: ToolFunction


class CalledFunction(Fields):
    """The function of a tool call in an assistant's message; its arguments are JSON text."""

    name: str
    arguments: str


class MessageToolCall(Fields):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # of a streamed delta, which some clients send back
    function: CalledFunction


class ChatMessage(Fields):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    # Fields of an answer, which clients send back.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    provider_specific_fields: dict[str, Any] | None = None  # LiteLLM's

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "a message with the role {role} needs content", {"role": self.role})
        return self


class ChatCompletionRequest(TextRequest):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    modalities: list[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
