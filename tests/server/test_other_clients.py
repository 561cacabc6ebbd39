"""LangChain, LiteLLM and Simon Willison's `llm`, unchanged."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import BaseModel

from mlxlm.server.conversation import ToolUse
from tests.server.conftest import CONTEXT, HELLO
from tests.server.test_tools import WEATHER, check_arguments

pytestmark = [
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm.*"),
]
MESSAGES = [("system", "Be brief."), ("human", "Hello!")]
SHORT = {"max_tokens": 8, "temperature": 0}


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Ulm", "Rome"]


@pytest.fixture(scope="module")
def langchain():
    """The package, imported by the process that runs this file only: it takes seconds."""
    return pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


@pytest.fixture
def make_chat(langchain, live):
    """`make_chat(**options)`: a chat model of LangChain."""
    address = {"model": "tiny", "base_url": live + "/v1", "api_key": "none", "max_retries": 0}
    return lambda **options: langchain.ChatOpenAI(**address, **{**SHORT, **options})


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain(make_chat, use_responses_api):
    chat = make_chat(use_responses_api=use_responses_api, stream_usage=True)
    answer = chat.invoke(MESSAGES)
    assert answer.text and answer.usage_metadata["output_tokens"] == 8
    chunks = list(chat.stream(MESSAGES))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8
    again = chat.invoke([*MESSAGES, answer, ("human", "And?")])
    assert again.usage_metadata["input_tokens"] > answer.usage_metadata["total_tokens"]


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_tools_of_langchain(make_chat, use_responses_api):
    from langchain_core.messages import ToolMessage

    options = {"temperature": 1.0, "max_tokens": 400, "use_responses_api": use_responses_api}
    chat = make_chat(**options).bind_tools([Weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    whole, *chunks = chat.stream(MESSAGES)
    for chunk in chunks:
        whole += chunk
    for asked in (chat.invoke(MESSAGES), whole):
        [call] = asked.tool_calls
        assert call["name"] == "Weather" and call["args"]["city"] in ("Ulm", "Rome")
        messages = [*MESSAGES, asked, ToolMessage("Rain", tool_call_id=call["id"])]
        assert make_chat(use_responses_api=use_responses_api).bind_tools([Weather]).invoke(messages).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_langchain(make_chat, method):
    chat = make_chat(temperature=1.0, max_tokens=400).with_structured_output(Weather, method=method)
    assert chat.invoke(MESSAGES).city in ("Ulm", "Rome")
    assert list(chat.stream(MESSAGES))[-1].city in ("Ulm", "Rome")


def test_errors_and_embeddings_of_langchain(make_chat, langchain, live):
    from langchain_core.exceptions import ContextOverflowError

    with pytest.raises(ContextOverflowError):
        make_chat().invoke("fox " * CONTEXT)
    options = {"check_embedding_ctx_length": False, "base_url": live + "/v1", "api_key": "none"}  # else tiktoken counts
    assert len(langchain.OpenAIEmbeddings(model="tiny", **options).embed_documents(["a", "b"])) == 2


@pytest.fixture(scope="module")
def litellm():
    """The package, imported by the process that runs this file only: it takes seconds."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches one
        module = pytest.importorskip("litellm", reason="litellm is not installed")
    module.suppress_debug_info = True  # it prints
    return module


@pytest.mark.parametrize(("kind", "path"), [("openai", "/v1"), ("anthropic", "")])
def test_litellm(litellm, live, kind, path):
    options = {"model": f"{kind}/tiny", "api_base": live + path, "api_key": "none", "num_retries": 0, **HELLO, **SHORT}
    answer = litellm.completion(**options)
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 8
    chunks = litellm.completion(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content != ""
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**options, "model": f"{kind}/big"})
    if kind == "openai":
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**{**options, "messages": [{"role": "user", "content": "fox " * CONTEXT}]})


def test_tools_of_litellm(litellm, live):
    options = {"model": "openai/tiny", "api_base": live + "/v1", "api_key": "none", **HELLO, "tools": [WEATHER]}
    forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400, "seed": 1}
    message = litellm.completion(**options, **forced).choices[0].message
    [call] = message.tool_calls
    check_arguments(json.loads(call.function.arguments))
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**options, **forced, stream=True))).choices[0]
    assert streamed.finish_reason == "tool_calls" and streamed.message.tool_calls[0].function == call.function
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
    options |= {"messages": [*options["messages"], message, result], "max_tokens": 5}
    assert litellm.completion(**options).usage.completion_tokens == 5


@pytest.fixture
def llm(live, tmp_path, monkeypatch):
    """The package `llm`, with a folder of its own for its models and logs."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    shared = {"model_name": "tiny", "api_base": live + "/v1", "supports_schema": True, "supports_tools": True}
    kinds = ({}, {"responses": True}, {"completion": True})
    models = [{**shared, **kind, "model_id": "-".join(["local", *kind])} for kind in kinds]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # which is YAML, too
    return pytest.importorskip("llm", reason="llm is not installed")


@pytest.mark.parametrize("name", ["local", "local-responses", "local-completion"])
def test_llm(llm, name):
    model = llm.get_model(name)
    response = model.prompt("Hello!", stream=False, **SHORT)
    text = response.text()
    assert text and (name == "local-completion" or response.usage().output == 8)
    chunks = list(model.prompt("Hello!", **SHORT))
    assert len(chunks) > 1 and "".join(chunks) == text


@pytest.mark.parametrize("name", ["local", "local-responses"])
def test_tools_and_schemas_of_llm(llm, name, monkeypatch):
    assert Weather.model_validate_json(llm.get_model(name).prompt("Where?", schema=Weather, temperature=0).text())
    # llm leaves it to the model whether it calls, and a random model doesn't.
    choices, of = ["required", "none"], ToolUse.from_openai
    monkeypatch.setattr(ToolUse, "from_openai", lambda tools, choice, _: of(tools, choice or choices.pop(0), False))
    asked = []

    def get_weather(city: Literal["Ulm", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "Rain"

    call, answer = llm.get_model(name).chain("Hello!", tools=[get_weather], options={"max_tokens": 200}).responses()
    assert call.tool_calls()[0].arguments == {"city": asked[0]} and asked[0] in ("Ulm", "Rome")
    assert answer.text()
