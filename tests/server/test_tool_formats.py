"""Models that are made to reason, and to call in the formats of Gemma 4 and LFM2, in all APIs."""

import json
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from mlxlm import tokenizer
from mlxlm.backend.mlx import mx
from mlxlm.families import config_from_hf
from mlxlm.generation import LoadedModel
from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings, ServedModel
from tests.chat.conftest import TEXT
from tests.chat.test_session import Scripted
from tests.chat.tool_templates import tokenizer_for
from tests.server.apis import PATHS, ask
from tests.small_models import random_decoder

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "object", "properties": {"c": {"type": "array"}}}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "f", "description": "Look.", "parameters": PARAMETERS}}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
# The reasoning, the calls, what ends an answer with calls and one without, and the end of the prompt.
FORMATS = {
    "gemma4": (
        "<|channel>thought\nHm.<channel|>",
        '<|tool_call>call:f{a:<|"|>{"<b|>"}<|"|>,b:{c:[1,<|"|><|"|>]}}<tool_call|><|tool_call>call:f{a:<|"|><|"|>}<tool_call|>',
        "<|tool_response>",
        "<turn|>",
        "<turn|>\n<|turn>model\n",
    ),
    "lfm2": (
        "",
        '<|tool_call_start|>[f(a=\'{"<b|>"}\', b={"c": [1, \'\']}), f(a="")]<|tool_call_end|>',
        "<|im_end|>",
        "<|im_end|>",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
}


@pytest.fixture(scope="module", params=FORMATS)
def client(request, tmp_path_factory):
    reasoning, calls, end_of_calls, end, begins = FORMATS[request.param]
    tokens = tokenizer_for(request.param, tokenizer.train(TEXT, 300))
    ends = [tokens.special_tokens[token] for token in {end_of_calls, end}]
    values = {"model_type": "llama", "vocab_size": tokens.vocab_size, "eos_token_id": ends, **SIZES}
    model = random_decoder(config_from_hf({**values, "max_position_embeddings": 2048}))
    mx.eval(model.parameters())
    lm = LoadedModel(model, tokens, model.config, tmp_path_factory.getbasetemp())
    lm = replace(lm, model=Scripted(lm, f"{reasoning}See.{calls}", "Look!" + begins, end_of_calls))
    lm.model.add(f'{reasoning}{{"ok": true}}', "JSON!" + begins, end)
    served = ServedModel("tiny", lm, ModelSettings(prefix_cache_bytes=0))
    models = Models({"tiny": ""}, served.settings)
    models.add(served)
    yield TestClient(make_app(models))
    served.engine.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", [api for api in PATHS if api != "completions"])
def test_reasoning_text_and_calls(request, client, api, stream):
    reasoning = "Hm." if "gemma4" in request.node.name else ""
    answer = ask(client, api, tools=[TOOL], question="Look!", stream=stream, max_tokens=200)
    assert (answer.reasoning, answer.text, answer.finish_reason) == (reasoning, "See.", "tool_calls")
    assert answer.arguments == '{"a": "{\\"<b|>\\"}", "b": {"c": [1, ""]}}{"a": ""}'
    form = {"type": "json_schema", "schema": SCHEMA, "name": "n", "json_schema": {"name": "n", "schema": SCHEMA}}
    forms = {
        "chat": {"response_format": form}, "responses": {"text": {"format": form}}, "messages": {"output_format": form},
    }  # fmt: skip
    answer = ask(client, api, tools=[TOOL], question="JSON!", stream=stream, max_tokens=200, **forms[api])
    assert (answer.reasoning, answer.text, answer.finish_reason) == (reasoning, '{"ok": true}', "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_ollama(client, stream):
    body = {"messages": [{"role": "user", "content": "Look!"}], "tools": [TOOL], "options": {"temperature": 0}}
    response = client.post("/api/chat", json={"model": "tiny", **body, "stream": stream})
    messages = [json.loads(line)["message"] for line in response.text.splitlines()]
    calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    assert calls == [{"a": '{"<b|>"}', "b": {"c": [1, ""]}}, {"a": ""}]
    assert "".join(message["content"] for message in messages) == "See."


def test_results_go_back_to_the_model(request, client):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
    messages = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": "See.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    ids = client.post("/tokenize", json={"messages": messages, "tools": [TOOL]}).json()["tokens"]
    prompt = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    if "gemma4" in request.node.name:  # text can't come before a call
        thought = "<|channel>thought\nSee.<channel|>"
        call_and_result = 'call:f{a:<|"|>x<|"|>}<tool_call|><|tool_response>response:f{value:<|"|>done<|"|>}'
        assert prompt.endswith(f"Look!<turn|>\n<|turn>model\n{thought}<|tool_call>{call_and_result}")
    else:
        call_and_text = '<|tool_call_start|>[f(a="x")]<|tool_call_end|>See.<|im_end|>\n'
        result = "<|im_start|>tool\ndone<|im_end|>\n<|im_start|>assistant\n"
        assert prompt.endswith(f"Look!<|im_end|>\n<|im_start|>assistant\n{call_and_text}{result}")
