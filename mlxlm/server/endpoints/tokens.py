"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse

from mlxlm.server.conversation import Conversation, ToolUse, functions_of
from mlxlm.server.endpoints import routes
from mlxlm.server.endpoints.chat_completions import ChatMessage, Tool
from mlxlm.server.errors import invalid
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import MAX_MESSAGES, MAX_TOOLS, Fields, TemplateFields
from mlxlm.tokenizer import Tokenizer


class TokenizeRequest(TemplateFields):
    """The body of /tokenize: a text as in vLLM's API or, with `content`, in llama.cpp's; or a conversation."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_special_tokens: bool = True  # of prompt
    add_special: bool = False  # of content, like the next one
    parse_special: bool = True
    with_pieces: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if [self.prompt, self.content, self.messages].count(None) != 2:
            raise ValueError("a request has either prompt, content or messages")
        return self


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


async def tokenize(request: Request) -> JSONResponse:
    """Return the ids of a text, as for /v1/completions, or of a conversation, as for /v1/chat/completions."""
    body = await read_body(request, TokenizeRequest)
    async with request.app.state.models.use(body.model) as model:
        tokenizer = model.lm.tokenizer
        if body.messages is not None:
            tools = ToolUse(functions_of(body.tools))
            messages = [message.to_chat() for message in body.messages]
            conversation = Conversation(messages, body.template_kwargs(), tools)
            ids = await conversation.encode(model, count_only=True)
        else:
            options = {"add_special_tokens": body.add_special_tokens}
            if body.content is not None:
                options = {"add_special_tokens": body.add_special, "parse_special": body.parse_special}
            ids = await model.encode(tokenizer.encode, body.content or body.prompt or "", **options, count_only=True)
        tokens = [{"id": id, "piece": _piece(tokenizer, id)} for id in ids] if body.with_pieces else ids
        return JSONResponse({"tokens": tokens, "count": len(ids), "max_model_len": model.context_length})


def _piece(tokenizer: Tokenizer, id: int) -> str | list[int]:
    """The text of a token, or its bytes if they aren't whole characters."""
    content = tokenizer.token_bytes(id, skip_special_tokens=False)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)


async def detokenize(request: Request) -> JSONResponse:
    """Return the text of ids, including special tokens."""
    body = await read_body(request, DetokenizeRequest)
    async with request.app.state.models.use(body.model) as model:
        vocab_size = model.lm.tokenizer.vocab_size
        unknown = [n for n, id in enumerate(body.tokens) if not 0 <= id < vocab_size]
        if unknown:
            raise invalid(f"the model has the ids 0 to {vocab_size - 1}", f"tokens.{unknown[0]}")
        decode = model.lm.tokenizer.decode
        text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": text, "content": text})  # vLLM's name, and llama.cpp's


ROUTES = routes("/tokenize", tokenize) + routes("/detokenize", detokenize)
