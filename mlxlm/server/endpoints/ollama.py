"""The endpoints of ollama's API that generate text: chats, prompts and embeddings. Streaming is their default."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxlm.chat.answer_parser import Part, Piece
from mlxlm.chat.messages import Message
from mlxlm.generation import GenerationOptions
from mlxlm.server.conversation import Conversation, ToolUse, continuation, functions_of
from mlxlm.server.endpoints.chat_completions import ChatMessage, Tool
from mlxlm.server.endpoints.completions import fill_in_the_middle
from mlxlm.server.endpoints.embeddings import embed_texts
from mlxlm.server.models import Models, ServedModel, check_keep_alive
from mlxlm.server.reply import NDJSON, Event, Reply, json_response, respond, timings_of
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import (
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TOOLS,
    Fields,
    ReplyFields,
    SamplingFields,
    TemplateFields,
    TextFormat,
)
from mlxlm.server.text import Text, describe_logprobs

_ROOM = 64  # tokens


class OllamaRequest(Fields):
    """What all requests have. Older clients say `name`."""

    model: str | None = Field(None, validation_alias=AliasChoices("model", "name"))
    keep_alive: float | str | None = None


class OllamaTextRequest(OllamaRequest, ReplyFields, TemplateFields):
    """The fields that /api/chat and /api/generate share."""

    stream: bool | None = True
    options: SamplingFields = SamplingFields()
    format: dict[str, Any] | Literal["", "json"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    def generation_options(self, defaults: GenerationOptions) -> GenerationOptions:
        """The generation options of the request. Raises ApiError for an invalid value."""
        schema = self.format if isinstance(self.format, dict) else None
        kind = "json_schema" if schema is not None else "json_object" if self.format else "text"
        form = TextFormat.model_validate({"type": kind, "schema": schema})
        return self.options.options(
            defaults,
            json_schema=self.options.schema_of_format(form, "format"),
            logprobs=(self.top_logprobs or 0) if self.logprobs or self.top_logprobs else None,
        )


class ChatRequest(OllamaTextRequest):
    """The body of /api/chat. Without messages, it loads the model."""

    messages: list[ChatMessage] = Field([], max_length=MAX_MESSAGES)
    tools: list[Tool] = Field([], max_length=MAX_TOOLS)


class GenerateRequest(OllamaTextRequest):
    """The body of /api/generate. Without a prompt, it loads the model."""

    prompt: str = ""
    suffix: str = ""
    system: str | None = None
    context: list[int] = []
    raw: bool | None = None


async def chat(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatRequest)
    if not body.messages:
        return await _load(request, body, is_chat=True)
    messages = list(_with_ids(message.to_chat() for message in body.messages))
    tools = ToolUse(functions_of(body.tools))
    conversation = Conversation(messages, body.template_kwargs(), tools)

    async def make_reply(model: ServedModel) -> _Answer:
        eos_token_ids = body.options.eos_token_ids(model.eos_token_ids)
        [text] = await conversation.answers(model, body.generation_options(model.defaults), eos_token_ids)
        return _Answer(model, text, body, is_chat=True)

    return await respond(request, body, make_reply, NDJSON)


def _with_ids(messages: Iterable[Message]) -> Iterator[Message]:
    """Give calls without ids some, and results the ids of the calls, which they answer in their order."""
    unanswered: list[str] = []
    for n, message in enumerate(messages):
        calls = tuple(replace(call, id=call.id or f"call_{n}_{k}") for k, call in enumerate(message.tool_calls))
        unanswered += [call.id for call in calls]
        answers = message.role == "tool" and message.tool_call_id is None and unanswered
        yield replace(message, tool_calls=calls, tool_call_id=unanswered.pop(0) if answers else message.tool_call_id)


async def generate(request: Request) -> Response:
    """Answer a prompt as a conversation, or continue it (`raw`), or fill in the middle (`suffix`)."""
    body = await read_body(request, GenerateRequest)
    if not body.prompt and not body.suffix:
        return await _load(request, body, is_chat=False)

    async def make_reply(model: ServedModel) -> _Answer:
        options = body.generation_options(model.defaults)
        eos_token_ids = body.options.eos_token_ids(model.eos_token_ids)
        if not body.raw and not body.suffix:
            roles = {"system": body.system, "user": body.prompt}
            messages = [Message(role, content) for role, content in roles.items() if content]
            [text] = await Conversation(messages, body.template_kwargs()).answers(model, options, eos_token_ids)
            if body.context:
                bos = model.lm.tokenizer.prefix_token_ids
                prompt = list(text.request.prompt)
                prompt = body.context + prompt[len(bos) if prompt[: len(bos)] == bos else 0 :]
                text.request = replace(text.request, prompt=prompt)
            return _Answer(model, text, body, is_chat=False)
        if body.suffix:
            middle = fill_in_the_middle(model)
            eos_token_ids |= middle.end_token_ids
            prompt = await model.encode(middle.encode, body.prompt, body.suffix)
        else:  # a template that the client has filled
            prompt = await model.encode(model.lm.tokenizer.encode, body.prompt, parse_special=True)
        text = continuation(model, prompt, options, eos_token_ids)
        return _Answer(model, text, body, is_chat=False)

    return await respond(request, body, make_reply, NDJSON)


class _Answer(Reply):
    def __init__(self, model: ServedModel, text: Text, body: OllamaTextRequest, is_chat: bool):
        super().__init__(model, [text])
        self._text, self._event = text, partial(_event, body.model or model.name, is_chat)
        self._has_context = isinstance(body, GenerateRequest) and not body.raw and not body.suffix
        self._num_calls = 0

    def start(self) -> Sequence[Event]:
        return ()

    def push(self, text: Text, pieces: Sequence[Piece]) -> Iterator[Event]:
        content, thinking = ("".join(p.text for p in pieces if p.part.kind == kind) for kind in ("text", "reasoning"))
        # The arguments of a call are an object, which isn't known before the call has ended.
        ended = [call for call in text.calls if text.finish_reason is not None or call is not text.parts[-1]]
        calls, self._num_calls = ended[self._num_calls :], len(ended)
        event = self._event(content, thinking, calls)
        if logprobs := text.take_logprobs():
            event["logprobs"] = describe_logprobs(logprobs, self.model.lm.tokenizer)
        if content or thinking or calls or logprobs:
            yield event

    def finish(self) -> list[Event]:
        return [{**self._event(), **self._statistics()}]

    def complete(self) -> dict[str, Any]:
        text = self._text
        content, thinking = text.text_of("text"), text.text_of("reasoning")
        event = self._event(content, thinking, text.calls)
        if text.request.options.logprobs is not None:
            event["logprobs"] = describe_logprobs(text.logprobs, self.model.lm.tokenizer)
        return {**event, **self._statistics()}

    def progress(self) -> bytes:
        """An event without text: NDJSON has no comments."""
        return self.encode(self._event())

    def _statistics(self) -> dict[str, Any]:
        result = self._text.result
        assert result is not None
        timings = timings_of(result)
        statistics = {
            "done": True,
            "done_reason": "length" if self._text.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(monotonic() - self.start_time),
            "load_duration": _nanoseconds(self.load_seconds),
            "prompt_eval_count": result.prompt_tokens,
            "prompt_eval_duration": _nanoseconds((timings["prompt_ms"] or 0) / 1000),
            "eval_count": len(result.tokens),
            "eval_duration": _nanoseconds((timings["predicted_ms"] or 0) / 1000),
        }
        return statistics | ({"context": [*self._text.request.prompt, *result.tokens]} if self._has_context else {})


def _event(
    name: str, is_chat: bool, content: str = "", thinking: str = "", calls: Sequence[Part] = ()
) -> dict[str, Any]:
    parts = {"role": "assistant", "content": content} if is_chat else {"response": content}
    values: dict[str, Any] = {**parts, **({"thinking": thinking} if thinking else {})}
    if called := [call for call in map(_call, calls) if call is not None]:
        values["tool_calls"] = called
    return {
        "model": name,
        "created_at": timestamp(datetime.now(UTC)),
        **({"message": values} if is_chat else values),
        "done": False,
    }


def _call(part: Part) -> dict[str, Any] | None:
    """A tool call; None for one that was cut off."""
    try:
        arguments = json.loads(part.text or "{}")
    except ValueError:
        return None
    return {"id": part.call_id, "function": {"name": part.name, "arguments": arguments}}


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def timestamp(time: datetime) -> str:
    """A time in ISO 8601."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")


async def _load(request: Request, body: OllamaTextRequest, is_chat: bool) -> JSONResponse:
    """Load a model, or unload it: what a request without a prompt asks for."""
    models: Models = request.app.state.models
    name = await models.find(body.model)
    unloads = body.keep_alive is not None and check_keep_alive(body.keep_alive) == 0
    if unloads:
        await models.unload(name)
    else:
        await models.load(name, body.keep_alive)
    event = _event(body.model or name, is_chat)
    return JSONResponse({**event, "done": True, "done_reason": "unload" if unloads else "load"})


class EmbedRequest(OllamaRequest):
    """The body of /api/embed, and of /api/embeddings, its older form with a single text."""

    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)] = []
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None


async def embed(request: Request) -> Response:
    """Return an embedding of each text. Unless `truncate` is false, only the beginning of a long text counts."""
    body = await read_body(request, EmbedRequest)
    texts = body.input if isinstance(body.input, list) else [body.input] if body.input else []
    return await json_response(request, _embed(request.app.state.models, body, texts))


async def embeddings(request: Request) -> Response:
    """Return an embedding of one text; none for an empty text, which only loads the model."""
    body = await read_body(request, EmbedRequest)

    async def first() -> dict[str, Any]:
        answer = await _embed(request.app.state.models, body, [body.prompt] if body.prompt else [])
        return {"embedding": answer["embeddings"][0] if body.prompt else []}

    return await json_response(request, first())


async def _embed(models: Models, body: EmbedRequest, texts: Sequence[str]) -> dict[str, Any]:
    start = monotonic()
    async with models.use(body.model, body.keep_alive) as model:
        load_seconds = monotonic() - start
        prompts = texts if body.truncate is False else await asyncio.to_thread(_truncate, model, texts)
        vectors, num_tokens = await embed_texts(model, prompts, body.dimensions, "input")
        return {
            "model": body.model or model.name,
            "embeddings": vectors,
            "total_duration": _nanoseconds(monotonic() - start),
            "load_duration": _nanoseconds(load_seconds),
            "prompt_eval_count": num_tokens,
        }


def _truncate(model: ServedModel, texts: Sequence[str]) -> list[str]:
    """The beginning of each text that fits into the context, with room for special tokens and the model's prompt."""
    size, tokenizer = max(1, model.context_length - _ROOM), model.lm.tokenizer

    def begin(text: str) -> str:
        ids = tokenizer.encode(text[: 16 * model.context_length], add_special_tokens=False)
        return tokenizer.decode(ids[:size]) if len(ids) > size else text

    return [begin(text) if len(text) > size else text for text in texts]


ROUTES = [
    Route(f"/api/{function.__name__}", function, methods=["POST"]) for function in (chat, generate, embed, embeddings)
]
