"""LangChain's ChatOpenAI and OpenAIEmbeddings, unchanged."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from pydantic import BaseModel

from tests.server.conftest import CONTEXT

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning")
MESSAGES = [("system", "Be brief."), ("human", "Hello!")]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Ulm", "Rome"]


@pytest.fixture(scope="module")
def langchain():
    """The package, imported by the process that runs this file only: it takes seconds."""
    return pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


@pytest.fixture
def make_chat(langchain, live):
    """`make_chat(**options)`: a chat model."""

    def make(**options):
        options = {"max_tokens": 8, "temperature": 0, **options}
        return langchain.ChatOpenAI(model="tiny", base_url=live + "/v1", api_key="none", max_retries=0, **options)

    return make


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_invoke_and_stream(make_chat, use_responses_api):
    chat = make_chat(use_responses_api=use_responses_api, stream_usage=True)
    answer = chat.invoke(MESSAGES)
    assert answer.text and answer.usage_metadata["output_tokens"] == 8
    chunks = list(chat.stream(MESSAGES))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8
    again = chat.invoke([*MESSAGES, answer, ("human", "And?")])
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["total_tokens"]


def test_async_and_batch(make_chat):
    async def use():
        chat = make_chat()
        parts = [chunk.text async for chunk in chat.astream(MESSAGES)]
        return "".join(parts), (await chat.ainvoke(MESSAGES)).text

    streamed, text = asyncio.run(use())
    assert streamed == text
    assert [answer.text for answer in make_chat().batch([MESSAGES] * 3)] == [text] * 3


def test_options(make_chat):
    from langchain_core.messages import HumanMessage

    chat = make_chat(logprobs=True, top_logprobs=2, n=2, seed=1, presence_penalty=0.5, top_p=0.9)
    [answers] = chat.generate([[HumanMessage("Hello!")]]).generations
    assert len(answers) == 2 and len(answers[0].generation_info["logprobs"]["content"]) == 8
    whole = make_chat().invoke(MESSAGES).text
    assert make_chat(stop=[whole[2:4]]).invoke(MESSAGES).text == whole[: whole.index(whole[2:4])]


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_bind_tools(make_chat, use_responses_api):
    from langchain_core.messages import ToolMessage

    options = {"temperature": 1.0, "max_tokens": 400, "use_responses_api": use_responses_api}
    chat = make_chat(**options).bind_tools([Weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    answer = chat.invoke(MESSAGES)
    [call] = answer.tool_calls
    assert call["name"] == "Weather" and call["args"]["city"] in ("Ulm", "Rome")
    whole, *chunks = chat.stream(MESSAGES)
    for chunk in chunks:
        whole += chunk
    [streamed] = whole.tool_calls
    assert streamed["name"] == "Weather" and streamed["args"]["city"] in ("Ulm", "Rome")
    for asked, made in ((answer, call), (whole, streamed)):
        messages = [*MESSAGES, asked, ToolMessage("Rain", tool_call_id=made["id"])]
        assert make_chat(use_responses_api=use_responses_api).bind_tools([Weather]).invoke(messages).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output(make_chat, method):
    chat = make_chat(temperature=1.0, max_tokens=400).with_structured_output(Weather, method=method)
    assert chat.invoke(MESSAGES).city in ("Ulm", "Rome")
    assert list(chat.stream(MESSAGES))[-1].city in ("Ulm", "Rome")


def test_json_mode(make_chat, lm):
    [*_, brace] = lm.tokenizer.encode("{}")  # which ends the object, since the random model wouldn't
    chat = make_chat(logit_bias={brace: 100}).with_structured_output(None, method="json_mode")
    assert chat.invoke(MESSAGES) == {}


def test_embeddings(langchain, live):
    options = {"check_embedding_ctx_length": False, "base_url": live + "/v1", "api_key": "none"}  # else tiktoken counts
    vectors = langchain.OpenAIEmbeddings(model="tiny", **options).embed_documents(["a", "b"])
    assert len(vectors) == 2 and len(vectors[0]) == 32


def test_errors(make_chat):
    import openai
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(openai.BadRequestError, match="temperature"):
        make_chat(temperature=-1).invoke(MESSAGES)
    with pytest.raises(ContextOverflowError):
        make_chat().invoke("fox " * CONTEXT)
