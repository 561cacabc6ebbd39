"""The APIs that generate text: one request in the form of each, and what its answer says, streamed or not."""

from __future__ import annotations

import json
from typing import NamedTuple

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_STOP_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


class Answer(NamedTuple):
    """What an answer says; `finish_reason` in the words of chat completions."""

    text: str
    reasoning: str
    arguments: str  # of its tool calls
    finish_reason: str | None
    logprobs: list


def events(text: str) -> list:
    """The data of server-sent events in order; "[DONE]" as it is."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [value if value == "[DONE]" else json.loads(value) for value in data]


def body_for(
    api: str, tools=(), call: str | None = None, logprobs: int | None = None, question: str = "Hello!", **fields
) -> dict:
    """A request of an API, with the fields of chat completions; it must call the function `call`."""
    body = {"temperature": 0, "max_tokens": 20, **fields}
    if api == "completions":
        return {"prompt": "The quick", **body}
    forced = {"parallel_tool_calls": False} if call else {}
    if api == "responses":
        body |= {"input": question, "max_output_tokens": body.pop("max_tokens"), "top_logprobs": logprobs}
        body |= {"tools": [{"type": "function", **tool["function"]} for tool in tools], **forced}
        return body | ({"tool_choice": {"type": "function", "name": call}} if call else {})
    body["messages"] = [{"role": "user", "content": question}]
    if api == "messages":
        body["stop_sequences"] = body.pop("stop", None)
        functions = [tool["function"] for tool in tools]
        body["tools"] = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
        choice = {"type": "tool", "name": call, "disable_parallel_tool_use": True}
        return body | ({"tool_choice": choice} if call else {})
    choice = {"tool_choice": {"type": "function", "function": {"name": call}}} if call else {}
    body |= {"tools": list(tools), **forced, **choice}
    return body | ({} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs})


def ask(client, api: str, *, stream: bool = False, **fields) -> Answer:
    """Send a request to one of the APIs; see `body_for`."""
    response = client.post(PATHS[api], json={**body_for(api, **fields), "stream": stream})
    assert response.status_code == 200, response.text
    if api in ("chat", "completions"):
        values = events(response.text)[:-1] if stream else [response.json()]
        return answer_of_choices([choice for value in values for choice in value["choices"]])
    if api == "responses":
        return _streamed_response(events(response.text)) if stream else _response(response.json())
    return _streamed_message(events(response.text)) if stream else _message(response.json())


def answer_of_choices(choices: list) -> Answer:
    """The answer in the choices of a response, or of the events of a stream."""
    parts = [choice.get("message") or choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    calls = [call["function"]["arguments"] for part in parts for call in part.get("tool_calls") or ()]
    text, reasoning = ("".join(part.get(key) or "" for part in parts) for key in ("content", "reasoning_content"))
    logprobs = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
    return Answer(text, reasoning, "".join(calls), choices[-1]["finish_reason"], logprobs)


def _response(response: dict) -> Answer:
    parts = [part for item in response["output"] for part in item.get("content", ())]
    text, reasoning = ("".join(p["text"] for p in parts if p["type"] == f"{k}_text") for k in ("output", "reasoning"))
    calls = [item["arguments"] for item in response["output"] if item["type"] == "function_call"]
    reason = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return Answer(text, reasoning, "".join(calls), reason, [e for part in parts for e in part.get("logprobs", ())])


def _streamed_response(stream: list) -> Answer:
    deltas = [event for event in stream if event["type"].endswith(".delta")]
    kinds = ("output_text", "reasoning_text", "function_call_arguments")
    joined = ["".join(e["delta"] for e in deltas if e["type"] == f"response.{kind}.delta") for kind in kinds]
    whole = _response(stream[-1]["response"])
    assert (whole.text, whole.reasoning, whole.arguments) == tuple(joined)
    return Answer(*joined, whole.finish_reason, [entry for event in deltas for entry in event.get("logprobs", ())])


def _message(message: dict) -> Answer:
    blocks = message["content"]
    text, reasoning = ("".join(b[kind] for b in blocks if b["type"] == kind) for kind in ("text", "thinking"))
    calls = [json.dumps(block["input"]) for block in blocks if block["type"] == "tool_use"]
    return Answer(text, reasoning, "".join(calls), _STOP_REASONS[message["stop_reason"]], [])


def _streamed_message(stream: list) -> Answer:
    deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta"]
    joined = ["".join(delta.get(key, "") for delta in deltas) for key in ("text", "thinking", "partial_json")]
    [reason] = [event["delta"]["stop_reason"] for event in stream if event["type"] == "message_delta"]
    return Answer(*joined, _STOP_REASONS[reason], [])
