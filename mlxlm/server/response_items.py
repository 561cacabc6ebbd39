"""The output items of OpenAI's Responses API, and their events in a stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxlm.generation.logprobs import TokenLogprobs
from mlxlm.server.conversation import Delta
from mlxlm.server.reply import new_id
from mlxlm.server.token_logprobs import chat_logprobs
from mlxlm.tokenizer import Tokenizer

Event = dict[str, Any]

_PART_TYPES = {"reasoning": "reasoning_text", "text": "output_text"}


class OutputItems:
    """Builds the items (reasoning, a message, tool calls) from the pieces of an answer.

    Attributes:
        items: The items so far. The last one may be unfinished.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.items: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._kind: str | None = None  # of the unfinished item

    def push(self, delta: Delta, entries: list[TokenLogprobs] | None = None) -> Iterator[Event]:
        """Add a piece, with the log-probabilities of its tokens; yield its events."""
        if delta.kind != self._kind or delta.call_id is not None:
            yield from self.finish()
            yield from self._start(delta)
        if not delta.text:
            return
        item = self.items[-1]
        if self._kind == "call":
            item["arguments"] += delta.text
            yield self._event("response.function_call_arguments.delta", delta=delta.text)
            return
        part = item["content"][0]
        part["text"] += delta.text
        event = self._part_event(f"response.{part['type']}.delta", delta=delta.text)
        if self._kind == "text":
            event["logprobs"] = chat_logprobs(entries or [], self._tokenizer)["content"]
            part["logprobs"] += event["logprobs"]
        yield event

    def finish(self, status: str = "completed") -> Iterator[Event]:
        """Finish the last item; yield its events."""
        if self._kind is None:
            return
        item = self.items[-1]
        if self._kind == "call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            extra = {"logprobs": part["logprobs"]} if self._kind == "text" else {}
            yield self._part_event(f"response.{part['type']}.done", text=part["text"], **extra)
            yield self._part_event("response.content_part.done", part=dict(part))
        item["status"] = status
        yield self._item_event("response.output_item.done")
        self._kind = None

    def _start(self, delta: Delta) -> Iterator[Event]:
        self._kind = delta.kind
        self.items.append(_new_item(delta))
        yield self._item_event("response.output_item.added")
        if delta.kind != "call":
            part = _new_part(delta.kind)
            self.items[-1]["content"] = [part]
            yield self._part_event("response.content_part.added", part=_copy(part))

    def _item_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, "item": _copy(self.items[-1])}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, content_index=0, **fields)


def _new_item(delta: Delta) -> dict[str, Any]:
    if delta.kind == "call":
        item = {"id": new_id("fc_"), "type": "function_call", "call_id": delta.call_id, "name": delta.name}
        return {**item, "arguments": "", "status": "in_progress"}
    if delta.kind == "reasoning":
        return {"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": [], "status": "in_progress"}


def _new_part(kind: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "text" else {}
    return {"type": _PART_TYPES[kind], "text": "", **extra}


def _copy(value: dict[str, Any]) -> dict[str, Any]:
    """A copy, because later pieces change the original."""
    copied = {key: list(part) if isinstance(part, list) else part for key, part in value.items()}
    if isinstance(content := copied.get("content"), list):
        copied["content"] = [_copy(part) for part in content]
    return copied
