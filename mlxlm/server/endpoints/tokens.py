"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse

from mlxlm.server.conversation import Conversation, ToolUse
from mlxlm.server.endpoints import routes
from mlxlm.server.endpoints.chat_completions import ChatMessage, Tool
from mlxlm.server.errors import invalid
from mlxlm.server.schemas import MAX_MESSAGES, MAX_TOOLS, Fields, TemplateFields, read_body


class TokenizeRequest(TemplateFields):
    """The body of /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("a request has either a prompt or messages")
        return self


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request) -> JSONResponse:
    """Return the ids of a text, as for /v1/completions, or of a conversation, as for /v1/chat/completions."""
    body = await read_body(request, TokenizeRequest)
    async with request.app.state.models.use(body.model) as model:
        if body.messages is not None:
            tools = ToolUse([tool.model_dump(exclude_none=True) for tool in body.tools or ()])
            messages = [message.to_chat() for message in body.messages]
            conversation = Conversation(messages, body.template_kwargs(), tools)
            ids = await conversation.encode(model, count_only=True)
        else:
            special = body.add_special_tokens
            ids = await model.encode(
                model.lm.tokenizer.encode, body.prompt or "", add_special_tokens=special, count_only=True
            )
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": model.context_length})


async def detokenize(request: Request) -> JSONResponse:
    """Return the text of ids, including special tokens."""
    body = await read_body(request, DetokenizeRequest)
    async with request.app.state.models.use(body.model) as model:
        vocab_size = model.lm.tokenizer.vocab_size
        unknown = [n for n, id in enumerate(body.tokens) if not 0 <= id < vocab_size]
        if unknown:
            raise invalid(f"the model has the ids 0 to {vocab_size - 1}", f"tokens.{unknown[0]}")
        decode = model.lm.tokenizer.decode
        return JSONResponse({"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)})


ROUTES = routes("/tokenize", tokenize) + routes("/detokenize", detokenize)
