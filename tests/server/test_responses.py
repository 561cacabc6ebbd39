"""POST /v1/responses and the responses that are kept."""

from __future__ import annotations

import json

import pytest

from mlxlm.server import stored_responses
from tests.server.apis import events
from tests.server.conftest import CONTEXT
from tests.server.test_tools import CALL, WEATHER

FUNCTION = {"type": "function", **WEATHER["function"]}


@pytest.fixture
def ask(client):
    """`ask(**fields)`: the response to a short question, greedy."""

    def ask(client=client, **fields):
        body = {"input": "Hello!", "temperature": 0, "max_output_tokens": 5, **fields}
        response = client.post("/v1/responses", json=body)
        return response.json() if not fields.get("stream") else events(response.text)[-1]["response"]

    return ask


def text_of(response):
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def user(text):
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on_from_a_response(client, ask, stream):
    first = ask(stream=stream)
    assert first["store"] is True and first["previous_response_id"] is None
    second = ask(input=[user("And?")], previous_response_id=first["id"], stream=stream)
    assert second["previous_response_id"] == first["id"]
    third = ask(input="Why?", previous_response_id=second["id"], instructions="Be brief.", stream=stream)
    items = [user("Hello!"), *first["output"], user("And?"), *second["output"], user("Why?")]
    same = ask(input=items, instructions="Be brief.")
    assert text_of(third) == text_of(same)
    assert third["usage"]["input_tokens"] == same["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    assert client.get(f"/v1/responses/{third['id']}").json() == third


def test_the_input_of_a_response(client, ask):
    first = ask()
    second = ask(input=[user("And?")], previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    listed = client.get(path, params={"order": "asc"}).json()
    assert [item["content"][0]["text"] for item in listed["data"]] == ["Hello!", text_of(first), "And?"]
    assert [item["content"][0]["type"] for item in listed["data"]] == ["input_text", "output_text", "input_text"]
    assert all(item["id"] for item in listed["data"]) and listed["data"][1]["id"] == first["output"][0]["id"]
    assert client.get(path).json()["data"] == listed["data"][::-1]


def test_what_is_not_kept(client, ask):
    kept, hidden = ask(), ask(store=False)
    assert hidden["store"] is False
    for id in (hidden["id"], "resp_", "..", "x" * 5000):
        error = ask(previous_response_id=id)["error"]
        assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
        assert client.get(f"/v1/responses/{id}").status_code == 404
    path = f"/v1/responses/{kept['id']}"
    assert client.delete(path).json() == {"id": kept["id"], "object": "response", "deleted": True}
    assert client.get(path).status_code == client.delete(path).status_code == 404


def test_the_oldest_responses_are_dropped(client, ask, monkeypatch):
    ids = [ask(input="x" * 500)["id"] for _ in range(2)]
    stored = client.app.state.stored_responses
    size = len(stored._contents[ids[0]])
    monkeypatch.setattr(stored_responses, "MAX_BYTES", 2 * size + 100)
    ids.append(ask(input="x" * 500)["id"])
    assert [client.get(f"/v1/responses/{id}").status_code for id in ids] == [404, 200, 200]
    monkeypatch.setattr(stored_responses, "MAX_BYTES", 10)
    assert client.get(f"/v1/responses/{ask()['id']}").status_code == 404 and not stored._contents


def test_items_by_reference(ask):
    first = ask()
    items = [user("Hello!"), {"type": "item_reference", "id": first["output"][0]["id"]}, user("And?")]
    assert text_of(ask(input=items)) == text_of(ask(input="And?", previous_response_id=first["id"]))
    assert ask(input=[{"type": "item_reference", "id": "msg_1"}])["error"]["param"] == "input.0.id"


def called(name, arguments):
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": json.dumps(arguments)}


def result(output):
    return {"type": "function_call_output", "call_id": "c", "output": output}


@pytest.mark.parametrize(
    ("items", "same"),
    [
        (
            [
                {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "Done"},
            ],
            [called("apply_patch", {"input": "*** Begin"}), result("Done")],
        ),
        (
            [
                {"type": "local_shell_call", "id": "x", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
                {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
            ],
            [called("local_shell", {"type": "exec", "command": ["ls"]}), result("a.txt")],
        ),
        (
            [
                {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
                {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a.txt", "stderr": ""}]},
            ],
            [called("shell", {"commands": ["ls"]}), result('[{"stdout": "a.txt", "stderr": ""}]')],
        ),
        ([called("f", {}), result([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])], None),
        ([{"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search"}}], []),
        ([{"type": "compaction", "encrypted_content": "abc"}], []),
        ([{"type": "additional_tools", "tools": [FUNCTION]}], []),
    ],
)
def test_items_of_other_types(ask, items, same):
    same = [called("f", {}), result("a\nb")] if same is None else same
    first, second = (ask(input=[user("Hi"), *each, user("And?")]) for each in (items, same))
    assert first["usage"]["input_tokens"] == second["usage"]["input_tokens"] and text_of(first) == text_of(second)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "call_id": "c", "name": "f"},
        {"type": "function_call_output", "output": "a"},
        {"type": "function_call_output", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "a"}]},
        {"type": "message", "role": "user"},
        {"type": 5},
    ],
)
def test_incomplete_items_are_refused(ask, item):
    assert ask(input=[user("Hi"), item])["error"]["param"].startswith("input.1")


def test_an_input_without_messages_is_refused(ask):
    assert ask(input=[{"type": "web_search_call", "id": "ws"}])["error"]["param"] == "input"
    assert ask(input=[])["error"]["message"] == "input: it should have at least 1 item, not 0"


def test_truncation_drops_the_oldest_turns(client, ask):
    system = {"role": "system", "content": "Be brief."}
    call = [called("get_weather", json.loads(CALL["function"]["arguments"])), result("Rain " * 20)]
    turns = [[user(f"{number} " * 40), *call, {"role": "assistant", "content": "Yes."}] for number in range(40)]

    def sent(turns):
        return [system, *(item for turn in turns for item in turn), user("And?")]

    assert ask(input=sent(turns))["error"]["code"] == "context_length_exceeded"
    auto = ask(input=sent(turns), truncation="auto", max_output_tokens=40)
    assert auto["truncation"] == "auto" and auto["status"] == "incomplete"
    used = {n: ask(input=sent(turns[n:]), max_output_tokens=1) for n in range(25, 40)}
    sizes = {n: each["usage"]["input_tokens"] for n, each in used.items() if "usage" in each}
    first = min(n for n, size in sizes.items() if size + 40 <= CONTEXT)
    assert auto["usage"]["input_tokens"] == sizes[first] and auto["usage"]["output_tokens"] == 40
    assert ask(truncation="auto")["usage"] == ask()["usage"]
    room = CONTEXT - sizes[first] + 1
    assert (
        ask(input=sent(turns), truncation="auto", max_output_tokens=room)["usage"]["input_tokens"] == sizes[first + 1]
    )
    error = ask(input=[system, user("fox " * CONTEXT)], truncation="auto")["error"]
    assert error["code"] == "context_length_exceeded"
