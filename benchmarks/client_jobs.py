"""What the clients of `clients.py` do: agents read a file with a tool, or edit it; libraries chat and call a tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.cli.clients import CLIENTS
from mlxlm.cli.running_server import Endpoint

PROMPT = "Read notes.txt. When is the meeting?"
TEXT = "It is at noon."


@dataclass(frozen=True)
class Job:
    """What a client does.

    Attributes:
        program: Its command.
        start: The command for a server, and environment variables. It may write a configuration to the folder.
        check: Arguments that print the version, and fail if the client is not installed.
        tools: {name: arguments} of the call that an agent is asked to make: of the first tool that it has.
        text: What it is answered then.
    """

    program: str
    start: Callable[[Endpoint, Path], tuple[list[str], Mapping[str, str]]]
    check: tuple[str, ...] = ("--version",)
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    text: str = TEXT


def _agent(name: str, *arguments: str, **values: Any) -> Job:
    """An agent, started as `mlxlm launch` does."""

    def start(endpoint: Endpoint, folder: Path) -> tuple[list[str], Mapping[str, str]]:
        command, variables = CLIENTS[name].start_without_settings(endpoint, folder)
        return [*command, *arguments], variables

    return Job(CLIENTS[name].program, start, **values)


_EDIT = "notes.txt\n```\nThe meeting is at one.\n```\n"
_CODEX = ("exec", "--skip-git-repo-check", "--sandbox", "read-only")
_AIDER = ("--no-git", "--yes-always", "--no-analytics", "--no-check-update", "--no-pretty", "notes.txt", "--message")


def agents(notes: str) -> dict[str, Job]:
    """The agents, which read the file `notes` or edit it."""
    shell = {"exec_command": {"cmd": "cat notes.txt"}, "shell_command": {"command": "cat notes.txt"}}
    return {
        "codex": _agent("codex", *_CODEX, PROMPT, tools=shell),
        "claude": _agent("claude", "-p", PROMPT, "--allowedTools", "Read", tools={"Read": {"file_path": notes}}),
        "opencode": _agent("opencode", "run", PROMPT, tools={"read": {"filePath": notes}}),
        "aider": _agent("aider", *_AIDER, "Move it to one.", tools={"none": {}}, text=_EDIT),
        "continue": _agent("continue", "-p", PROMPT, "--auto", tools={"Read": {"filepath": notes}}),
    }


_WEATHER = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Ulm", "Rome"]}}, "required": ["city"]}
_FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": _WEATHER}
_TOOL = json.dumps({"type": "function", "function": _FUNCTION})
_MESSAGES = json.dumps([{"role": "user", "content": "How is the weather in Ulm?"}])


def _python(package: str, code: str, module: str = "") -> Job:
    """A Python program with `url`, `model`, `messages` and `tool`, which uses a package."""
    names = f"import sys; url, model = sys.argv[1:]; messages, tool = {_MESSAGES}, {_TOOL}\n"
    check = f"import {module or package.replace('-', '_')}, importlib.metadata as m; print(m.version({package!r}))"
    return Job("python", lambda at, folder: (["python", "-c", names + code, at.url, at.model], {}), ("-c", check))


def _node(package: str, code: str) -> Job:
    """The same for Node.js, which finds the package through NODE_PATH."""
    names = f"const [url, model] = process.argv.slice(1), messages = {_MESSAGES}, tool = {_TOOL};\n"
    files = f"process.env.NODE_PATH.split(':').map(folder => folder + '/{package}/package.json')"
    check = f"console.log(JSON.parse(fs.readFileSync({files}.find(fs.existsSync))).version)"
    return Job("node", lambda at, folder: (["node", "-e", names + code, at.url, at.model], {}), ("-e", check))


LIBRARIES = {
    "openai-python": _python(
        "openai",
        """
import openai
client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
client.models.list()
client.chat.completions.create(model=model, messages=messages, max_completion_tokens=8, top_logprobs=2, logprobs=True)
asked = client.chat.completions.create(model=model, messages=messages, tools=[tool], tool_choice="required")
call = asked.choices[0].message
result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "rain"}
list(client.chat.completions.create(model=model, messages=[*messages, call, result], max_tokens=8, stream=True))
first = client.responses.create(model=model, input="Hello!", max_output_tokens=8, store=True, truncation="auto")
client.responses.create(model=model, input="And?", max_output_tokens=8, previous_response_id=first.id)
client.embeddings.create(model=model, input=["a", "b"])
""",
    ),
    "anthropic-python": _python(
        "anthropic",
        """
import anthropic
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
client.models.list()
cached = {"cache_control": {"type": "ephemeral"}}
tools = [{"name": "get_weather", "input_schema": tool["function"]["parameters"], **cached}]
system = [{"type": "text", "text": "Be brief.", **cached}]
client.messages.count_tokens(model=model, messages=messages, tools=tools, system=system)
with client.messages.stream(model=model, messages=messages, max_tokens=8, system=system) as stream:
    stream.get_final_message()
asked = client.messages.create(model=model, messages=messages, tools=tools, tool_choice={"type": "any"}, max_tokens=400)
[call] = [block for block in asked.content if block.type == "tool_use"][:1]
result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
told = [*messages, {"role": "assistant", "content": [call.model_dump()]}, result]
client.messages.create(model=model, messages=told, tools=tools, max_tokens=8)
""",
    ),
    "ollama-python": _python(
        "ollama",
        """
import ollama
client = ollama.Client(host=url)
client.list(); client.show(model); client.ps()
short = {"num_predict": 8, "num_ctx": 4096, "temperature": 0, "seed": 1, "top_k": 40, "repeat_penalty": 1.1}
client.chat(model=model, messages=messages, options=short, keep_alive="5m")
list(client.chat(model=model, messages=messages, options=short, stream=True, tools=[tool]))
call = {"function": {"name": "get_weather", "arguments": {"city": "Ulm"}}}
result = {"role": "tool", "tool_name": "get_weather", "content": "rain"}
told = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}, result]
client.chat(model=model, messages=told, tools=[tool], options=short)
client.chat(model=model, messages=messages, format=tool["function"]["parameters"], options={"num_predict": 100})
client.generate(model=model, prompt="Hello", options=short, raw=True)
list(client.generate(model=model, prompt="Hello", options=short, stream=True, think=False))
client.embed(model=model, input=["a", "b"]); client.embeddings(model=model, prompt="a")
client.generate(model=model, keep_alive=0)
""",
    ),
    "llm": _python(
        "llm",
        """
import json, os, pathlib
pathlib.Path("llm").mkdir(); os.environ["LLM_USER_PATH"] = "llm"
settings = {"model_id": "local", "model_name": model, "api_base": url + "/v1", "supports_tools": True,
    "supports_schema": True}
pathlib.Path("llm/extra-openai-models.yaml").write_text(json.dumps([settings]))
import llm
local = llm.get_model("local")
local.prompt("Hello", max_tokens=8).text()
local.prompt("Hello", system="Be brief.", max_tokens=8, stream=False).text()
local.prompt("Where?", schema=tool["function"]["parameters"], max_tokens=100).text()
weather = llm.Tool(name="get_weather", input_schema=tool["function"]["parameters"])
local.prompt("Hello", tools=[weather], max_tokens=8).text()
""",
    ),
    "litellm": _python(
        "litellm",
        """
import os
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm
for kind, address in (("openai", url + "/v1"), ("anthropic", url), ("ollama_chat", url), ("hosted_vllm", url + "/v1")):
    where = {"model": f"{kind}/{model}", "api_base": address, "api_key": "none", "num_retries": 0, "messages": messages}
    litellm.completion(**where, max_tokens=8)
    list(litellm.completion(**where, max_tokens=8, tools=[tool], stream=True))
""",
    ),
    "langchain-openai": _python(
        "langchain-openai",
        """
from langchain_openai import ChatOpenAI
for responses in (False, True):
    chat = ChatOpenAI(model=model, base_url=url + "/v1", api_key="none", max_retries=0, use_responses_api=responses)
    chat = chat.bind(max_tokens=8)
    chat.invoke("Hello"); list(chat.stream("Hello"))
    list(ChatOpenAI(model=model, base_url=url + "/v1", api_key="none", max_retries=0, use_responses_api=responses,
        max_tokens=400).bind_tools([tool], tool_choice="required").stream("Hello"))
""",
    ),
    "langchain-ollama": _python(
        "langchain-ollama",
        """
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
chat = ChatOllama(model=model, base_url=url, num_predict=8, num_ctx=4096)
chat.invoke("Hello"); list(chat.stream("Hello")); list(chat.bind_tools([tool]).stream("Hello"))
ChatOllama(model=model, base_url=url, num_predict=100, format="json").invoke("Hello")
OllamaLLM(model=model, base_url=url, num_predict=8).invoke("Hello")
OllamaEmbeddings(model=model, base_url=url).embed_documents(["a", "b"])
""",
    ),
    "openai-node": _node(
        "openai",
        """
const OpenAI = require('openai');
(async () => {
  const client = new OpenAI({baseURL: url + '/v1', apiKey: 'none', maxRetries: 0});
  await client.models.list();
  await client.chat.completions.create({model, messages, max_tokens: 8});
  const stream = await client.chat.completions.create({model, messages, max_tokens: 8, stream: true, tools: [tool]});
  for await (const chunk of stream);
  await client.responses.create({model, input: 'Hello!', max_output_tokens: 8});
})();
""",
    ),
    "ollama-js": _node(
        "ollama",
        """
const {Ollama} = require('ollama');
(async () => {
  const client = new Ollama({host: url}), options = {num_predict: 8};
  await client.list(); await client.show({model}); await client.ps();
  await client.chat({model, messages, options, keep_alive: '5m'});
  for await (const chunk of await client.chat({model, messages, options, tools: [tool], stream: true}));
  await client.generate({model, prompt: 'Hello', options});
  for await (const chunk of await client.generate({model, prompt: 'Hello', suffix: '', options, stream: true}));
  await client.embed({model, input: 'a'});
})();
""",
    ),
}
