"""The fields that the bodies of several APIs share. See `request_body` for how they are read."""

from __future__ import annotations

import json
from dataclasses import Field as DataclassField
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from mlxlm.config.option import declaration, options_of, types_of
from mlxlm.generation import GenerationOptions
from mlxlm.server.errors import invalid
from mlxlm.server.other_servers import translate
from mlxlm.utils.errors import GenerationError

MAX_MESSAGES = 10_000
MAX_PROMPTS = 2048
MAX_N = 128
MAX_TOOLS = 128
_MAX_STOP_STRINGS = 64
_MAX_STOP_TOKENS = 1024


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
        return translate(value, cls.model_fields) if isinstance(value, dict) else value


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
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value if value != "" else "{}"


def _as_bias(value: Any) -> Any:
    """llama.cpp has pairs, such as [[5, 1.0], [6, false]]. false: never this token."""
    if not isinstance(value, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return value
    return {str(token): -100.0 if bias is False else bias for token, bias in value}


Schema = dict[str, Any] | bool | str | None
Strings = Annotated[list[str], BeforeValidator(_without_empty), Field(max_length=_MAX_STOP_STRINGS)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MAX_STOP_TOKENS)]
JsonText = Annotated[str, BeforeValidator(_as_json)]  # an object as text, or as it is; "" for an empty one
TextContent = Annotated[str, BeforeValidator(join_text_parts)]


def _flat_format(value: Any) -> Any:
    """Chat completions have the schema in an object `json_schema`."""
    inner = value.get("json_schema") if isinstance(value, dict) else None
    return {**inner, **value, "json_schema": None} if isinstance(inner, dict) else value


class TextFormat(Fields):
    """`response_format`, `text.format` or `output_config.format`. A schema is enforced with or without `strict`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


Format = Annotated[TextFormat, BeforeValidator(_flat_format)]


def _type_of(field: DataclassField[Any]) -> Any:
    """The type of an option in a request, None included."""
    limit = Field(max_length=declaration(field).max_items)
    match types_of(field)[0]:
        case "tuple[str, ...]":
            return Annotated[list[str], BeforeValidator(_as_list), limit] | None
        case "Mapping[int, float]":
            return Annotated[dict[str, float], BeforeValidator(_as_bias), limit] | None
        case kind:
            return Schema if field.name == "json_schema" else _TYPES[kind] | None


_TYPES: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str}
_definitions: dict[str, Any] = {
    name: (_type_of(field), None)
    for name, field in options_of(GenerationOptions).items()
    if name != "logprobs"  # which each API has in its own way
} | {"stop": (Strings | None, None)}
_OptionFields = create_model("_OptionFields", __base__=Fields, **_definitions)


_MIN_TEMPERATURE = declaration(options_of(GenerationOptions)["temperature"]).low or 0  # 1e-8 means greedy
# With a window of no tokens, a penalty is off (llama.cpp).
_WINDOWS = (("repetition_context_size", "repetition_penalty", 1.0), ("dry_penalty_last_n", "dry_multiplier", 0.0))


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
            GenerationError: For an invalid value.
        """
        values = {name: getattr(self, name) for name in _definitions} | others
        if values["choice"] == []:
            raise GenerationError("choice is an empty list", "one text or more")
        values = {name: value for name, value in values.items() if value is not None}
        if values.get("max_tokens") == -1:
            values["max_tokens"] = None
        if 0 < values.get("temperature", 1) < _MIN_TEMPERATURE:
            values["temperature"] = 0.0
        for window, penalty, off in _WINDOWS:
            if values.get(window) == 0:
                del values[window]
                values[penalty] = off
        return replace(defaults, **values)

    def schema_of_format(self, form: TextFormat, field: str) -> Schema:
        """The JSON schema of the text: that of the API's own `field`, or else `json_schema`.

        Raises:
            ApiError: If the field lacks its schema, or the request has another constraint, too.
        """
        if form.type == "text":
            return self.json_schema
        if any(value is not None for value in (self.json_schema, self.regex, self.choice, self.grammar)):
            raise invalid(f"{field} and another constraint (try: one of them)", field)
        if form.type == "json_schema" and form.json_schema is None:
            raise invalid(f"{field} has no schema", field)
        return {"type": "object"} if form.json_schema is None else form.json_schema


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
