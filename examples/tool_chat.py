"""A chat bot that can call Python functions, streamed through OpenAI's client.

    mlxlm serve my-model
    python examples/tool_chat.py my-model

Use a model that was trained to call tools, such as Qwen. A grammar makes every call valid for any model.
"""

import argparse
import json
import sys
from datetime import datetime

from openai import LengthFinishReasonError, OpenAI
from openai.lib.streaming.chat import ContentDeltaEvent

FUNCTIONS = {"get_time": lambda: f"{datetime.now():%H:%M}", "multiply": lambda a, b: a * b}
NUMBERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
TOOLS = [
    {"type": "function", "function": {"name": "get_time", "description": "The time of day."}},
    {"type": "function", "function": {"name": "multiply", "description": "Multiply a and b.", "parameters": NUMBERS}},
]


def answer(client: OpenAI, model: str, messages: list[dict]) -> None:
    """Print the answer as it comes, run the functions that it calls, and let the model continue, at most 5 times."""
    for _ in range(5):
        try:
            with client.chat.completions.stream(model=model, messages=messages, tools=TOOLS, max_tokens=200) as stream:
                for event in stream:
                    if isinstance(event, ContentDeltaEvent):
                        print(event.delta, end="", flush=True)
                message = stream.get_final_completion().choices[0].message
        except LengthFinishReasonError as error:  # calls are incomplete
            message = error.completion.choices[0].message
            message.tool_calls = None
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
        if not message.tool_calls:
            print()
            return
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"\n[{call.function.name} {call.function.arguments} = {result}]")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def main() -> None:
    """Answer each line of standard input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    options = parser.parse_args()
    client, messages = OpenAI(base_url=options.base_url, api_key="none"), []
    for line in sys.stdin:
        messages.append({"role": "user", "content": line.strip()})
        answer(client, options.model, messages)


if __name__ == "__main__":
    main()
