"""Simon Willison's `llm`, unchanged, with the server's model in its extra-openai-models.yaml."""

from __future__ import annotations

from typing import Literal

import pytest
from click.testing import CliRunner
from pydantic import BaseModel

from mlxlm.server.conversation import ToolUse

MODELS = """
- model_id: local
  model_name: tiny
  api_base: {live}/v1
  supports_schema: true
  supports_tools: true
- model_id: local-responses
  model_name: tiny
  api_base: {live}/v1
  responses: true
  supports_schema: true
  supports_tools: true
- model_id: local-completion
  model_name: tiny
  api_base: {live}/v1
  completion: true
"""
SHORT = {"max_tokens": 8, "temperature": 0}
BOTH = pytest.mark.parametrize("name", ["local", "local-responses"])


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Ulm", "Rome"]


@pytest.fixture
def llm(live, tmp_path, monkeypatch):
    """The package, with a folder of its own for its models and logs."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(live=live))
    return pytest.importorskip("llm", reason="llm is not installed")


@pytest.mark.parametrize("name", ["local", "local-responses", "local-completion"])
def test_prompt(llm, name):
    model = llm.get_model(name)
    response = model.prompt("Hello!", stream=False, **SHORT)
    text = response.text()
    assert text and (name == "local-completion" or response.usage().output == 8)
    chunks = list(model.prompt("Hello!", **SHORT))
    assert len(chunks) > 1 and "".join(chunks) == text


@BOTH
def test_conversation(llm, name):
    conversation = llm.get_model(name).conversation()
    first = conversation.prompt("Hello!", system="Be brief.", stream=False, **SHORT)
    assert first.text()
    second = conversation.prompt("And?", stream=False, **SHORT)
    assert second.text() and second.usage().input > first.usage().input + 8


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_schema(llm, name, stream):
    text = llm.get_model(name).prompt("Where?", schema=Weather, stream=stream, temperature=0).text()
    assert Weather.model_validate_json(text)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
def test_tools(llm, name, stream, monkeypatch):
    # llm leaves it to the model whether it calls, and a random model doesn't.
    choices, of = ["required", "none"], ToolUse.from_openai
    monkeypatch.setattr(
        ToolUse, "from_openai", lambda tools, choice, parallel: of(tools, choice or choices.pop(0), False)
    )
    asked = []

    def get_weather(city: Literal["Ulm", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "Rain"

    chain = llm.get_model(name).chain("Hello!", tools=[get_weather], stream=stream, options={"max_tokens": 200})
    call, answer = chain.responses()
    assert call.tool_calls()[0].arguments == {"city": asked[0]} and asked[0] in ("Ulm", "Rome")
    assert answer.text()


def test_command(llm, live):
    from llm.cli import cli

    options = ["Hello!", "-o", "max_tokens", "8", "-o", "temperature", "0"]
    text = llm.get_model("local").prompt("Hello!", **SHORT).text()
    endpoint = ["openai", "endpoint", live + "/v1", "-m", "tiny"]
    for command in (["-m", "local"], ["-m", "local", "--no-stream"], endpoint):
        result = CliRunner().invoke(cli, [*command, *options], catch_exceptions=False)
        assert result.exit_code == 0 and result.stdout == text + "\n", result.output


def test_errors(llm):
    import openai

    with pytest.raises(openai.BadRequestError, match="logit_bias names the token 99999"):
        llm.get_model("local").prompt("Hello!", logit_bias='{"99999": 1}').text()
