"""Small requests, and requests that use every field, with parts changed: an answer or a 4xx, never a server's error."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.server.endpoints.chat_completions import ChatCompletionRequest
from mlxlm.server.endpoints.completions import CompletionRequest
from mlxlm.server.endpoints.embeddings import EmbeddingRequest
from mlxlm.server.endpoints.llama_cpp import LlamaCppCompletionRequest
from mlxlm.server.endpoints.messages import MessagesRequest
from mlxlm.server.endpoints.ollama import ChatRequest, GenerateRequest
from mlxlm.server.endpoints.responses import ResponseRequest
from mlxlm.server.endpoints.tokens import TokenizeRequest
from mlxlm.server.other_servers import NAMES, UNSUPPORTED
from tests.server.apis import PATHS
from tests.server.test_errors import VALID, check_error
from tests.server.test_tools import CALL, NAMED, NOTHING, PARAMETERS, WEATHER

OLLAMA_CALL = {"function": {"name": "get_weather", "arguments": {"city": "Ulm", "days": 2}}}
SCHEMA = {"type": "json_schema", "schema": PARAMETERS}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
        {"role": "tool", "tool_call_id": "call_1", "content": "x"},
    ],
    "tools": [WEATHER, NOTHING],
    "tool_choice": NAMED,
    "max_tokens": 2,
    "n": 2,
    "logprobs": True,
    "top_logprobs": 2,
    "stop": ["x"],
    "logit_bias": {"9": 1.0},
    "stream": False,
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}},
    "chat_template_kwargs": {"enable_thinking": False},
}
RESPONSES = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "id": "a", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "x"}]},
    ],
    "tools": [{"type": "function", **WEATHER["function"]}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
    "text": {"format": {**SCHEMA, "name": "a"}, "verbosity": "low"},
    "reasoning": {"effort": "low"},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 2,
    "stream": False,
}
MESSAGES = {
    "max_tokens": 2,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "a", "signature": ""}]
            + [{"type": "tool_use", "id": "a", "name": "get_weather", "input": {"a": 1}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x", "is_error": True}]},
    ],
    "tools": [{"name": "get_weather", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "tool", "name": "get_weather"},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": SCHEMA},
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "stop_sequences": ["x"],
    "stream": False,
}
OLLAMA = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "", "thinking": "r", "tool_calls": [OLLAMA_CALL]},
        {"role": "tool", "tool_name": "get_weather", "content": "x"},
    ],
    "tools": [WEATHER, NOTHING],
    "format": PARAMETERS,
    "think": False,
    "options": {"num_predict": 2, "temperature": 0.5, "stop": ["x"]},
    "keep_alive": "5m",
    "logprobs": True,
    "stream": False,
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": ["a", [8, 9]], "max_tokens": 2, "echo": True, "logprobs": 1, "n": 2, "choice": ["a"]},
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": {"input": ["a", [8, 9]], "encoding_format": "float"},
    "/api/chat": OLLAMA,
    "/api/generate": {"prompt": "a", "system": "s", "context": [8, 9], "options": {"num_predict": 2}, "stream": False},
    "/completion": {"prompt": "a", "n_predict": 2, "response_fields": ["content", "timings/prompt_n"]},
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)
PLAUSIBLE = st.sampled_from(
    (0, 1, 2, -1, 10**400, 0.5, 1e308, True, False, None, "", "a", "\ufdd0", [], ["a"], {}, {"type": "object"})
    + ({"5": 1}, {"type": "json_object"}, {"include_usage": True}, [{"type": "text", "text": "a"}])
)
SAME = ("/api/v0/", "/api/v1/", "/api/push")  # as other endpoints
SCHEMAS = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponseRequest,
    MessagesRequest,
    EmbeddingRequest,
    TokenizeRequest,
    ChatRequest,
    GenerateRequest,
    LlamaCppCompletionRequest,
)
LIMITS = {"max_tokens", "max_output_tokens", "options"}  # without them a text is long
FIELDS = sorted({name for schema in SCHEMAS for name in schema.model_fields} - LIMITS) + ["nothing"]
FIELDS += sorted({*NAMES, *UNSUPPORTED, "structured_outputs"} - LIMITS)


def paths(value, path=()):
    """The paths of all parts of a JSON value."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[key], (*path, key))


def replaced(value, path, part):
    if not path:
        return part
    value[path[0]] = replaced(value[path[0]], path[1:], part)
    return value


@pytest.mark.parametrize("path", BODIES)
def test_the_requests_are_valid(client, path):
    response = client.post(path, json=BODIES[path])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [path for path in VALID if not path.startswith(SAME)])
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_changed_requests_have_a_well_formed_answer(client, path, data):
    body = copy.deepcopy(data.draw(st.sampled_from([VALID[path], BODIES.get(path, VALID[path])])))
    body |= {"stream": data.draw(st.booleans())} if path in PATHS.values() else {}
    for _ in range(data.draw(st.integers(1, 2))):
        value = copy.deepcopy(data.draw(PLAUSIBLE | VALUES))
        if isinstance(body, dict) and data.draw(st.booleans()):
            body[data.draw(st.sampled_from(FIELDS))] = value
        else:
            body = replaced(body, data.draw(st.sampled_from(list(paths(body)))), value)
    if path in ("/api/chat", "/api/generate") and isinstance(body, dict):
        options = body.get("options")
        body["options"] = {**(options if isinstance(options, dict) else {}), "num_predict": 2}
    response = client.post(path, content=json.dumps(body))
    if response.status_code != 200:
        assert 400 <= response.status_code < 500, response.text
        check_error(response, response.status_code)
    elif response.headers.get("content-type") == "application/x-ndjson":
        assert all(isinstance(json.loads(line), dict) for line in response.text.splitlines())
    elif response.content and not response.text.startswith(("data:", ":", "event:")):
        assert isinstance(response.json(), dict)
    assert "server_error" not in response.text and "api_error" not in response.text
