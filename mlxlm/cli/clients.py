"""Editors and agents that use a server of mlxlm, and what each needs to know: see docs/clients.md."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlm.cli.running_server import Endpoint

_TIMEOUT_MS = 3_600_000  # a prompt may take longer to read than the defaults of clients, 5 to 15 minutes


@dataclass(frozen=True)
class Client:
    """An editor or agent.

    Attributes:
        install: How to install it.
        path: Its configuration file; `~` is the home folder, and environment variables may move it.
        settings: The content of that file.
        command: How it is started with that file, {file}, and {model}.
        merge: Whether the file has other settings, too, in JSON; else it is ours alone.
        launch: How it is started without that file: the command and environment variables. None for clients that take
            the path of the file as an argument.
    """

    install: str
    path: str
    settings: Callable[[Endpoint], str]
    command: str
    merge: bool = False
    launch: Callable[[Endpoint], tuple[list[str], dict[str, str]]] | None = None

    @property
    def file(self) -> Path:
        """The configuration file, where it is on this machine."""
        folders = {"~/.config": "XDG_CONFIG_HOME", "~/.codex": "CODEX_HOME", "~/.claude": "CLAUDE_CONFIG_DIR"}
        for default, variable in folders.items():
            if self.path.startswith(default) and (folder := os.environ.get(variable)):
                return Path(folder + self.path.removeprefix(default))
        return Path(self.path).expanduser()

    @property
    def program(self) -> str:
        """The program of the command."""
        return self.command.split()[0]

    def start(self, endpoint: Endpoint, file: Path) -> list[str]:
        """The command that starts it with a configuration file."""
        return [word.format(file=file, model=endpoint.model) for word in self.command.split()]

    def start_without_settings(self, endpoint: Endpoint, folder: Path) -> tuple[list[str], dict[str, str]]:
        """The command, and environment variables, that start it with a configuration in a temporary folder."""
        if self.launch is not None:
            return self.launch(endpoint)
        file = folder / self.file.name
        file.write_text(self.settings(endpoint), encoding="utf-8")
        return self.start(endpoint, file), {}


def to_json(settings: Any) -> str:
    """JSON as people write it."""
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _claude(endpoint: Endpoint) -> str:
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))
    variables = {"ANTHROPIC_BASE_URL": endpoint.url, "ANTHROPIC_AUTH_TOKEN": endpoint.key}
    variables |= dict.fromkeys(names, endpoint.model)
    if endpoint.context_length:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(endpoint.context_length)
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(endpoint.context_length)
    variables["API_TIMEOUT_MS"] = str(_TIMEOUT_MS)
    variables["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    # Otherwise prompts begin with a hash of the first message: a new conversation would find no prefix in the cache.
    variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] = "0"
    return to_json({"env": variables})


def _codex(endpoint: Endpoint) -> str:
    values: dict[str, Any] = {"model": endpoint.model, "model_provider": "mlxlm"}
    if endpoint.context_length:
        values["model_context_window"] = endpoint.context_length
    provider: dict[str, Any] = {"name": "mlxlm", "base_url": f"{endpoint.url}/v1", "wire_api": "responses"}
    provider["stream_idle_timeout_ms"] = _TIMEOUT_MS
    if endpoint.key != "none":
        provider["env_key"] = "MLXLM_API_KEY"
    values |= {f"model_providers.mlxlm.{name}": value for name, value in provider.items()}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())  # TOML


def _opencode(endpoint: Endpoint) -> str:
    model: dict[str, Any] = {"name": endpoint.model, "tool_call": True}
    if length := endpoint.context_length:
        model["limit"] = {"context": length, "output": min(length // 4, 8192)}
    options: dict[str, Any] = {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.key}
    options |= dict.fromkeys(("timeout", "headerTimeout", "chunkTimeout"), _TIMEOUT_MS)
    provider: dict[str, Any] = {"npm": "@ai-sdk/openai-compatible", "name": "mlxlm", "options": options}
    provider["models"] = {endpoint.model: model}
    return to_json({"$schema": "https://opencode.ai/config.json", "provider": {"mlxlm": provider}})


def _aider(endpoint: Endpoint) -> str:
    values: dict[str, Any] = {"model": f"openai/{endpoint.model}", "openai-api-base": f"{endpoint.url}/v1"}
    values |= {"openai-api-key": endpoint.key, "show-model-warnings": False}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())  # YAML


def _zed(endpoint: Endpoint) -> str:
    model: dict[str, Any] = {"name": endpoint.model, "display_name": endpoint.model}
    model["max_tokens"] = endpoint.context_length or 8192  # which Zed needs
    model["capabilities"] = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False}
    provider = {"api_url": f"{endpoint.url}/v1", "available_models": [model]}
    return to_json({"language_models": {"openai_compatible": {"mlxlm": provider}}})


def _continue(endpoint: Endpoint) -> str:
    model: dict[str, Any] = {"name": endpoint.model, "provider": "openai", "model": endpoint.model}
    model |= {
        "apiBase": f"{endpoint.url}/v1",
        "apiKey": endpoint.key,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
    }
    if endpoint.context_length:
        model["contextLength"] = endpoint.context_length
    first, *others = (f"{name}: {json.dumps(value)}\n" for name, value in model.items())
    return f"name: mlxlm\nversion: 1.0.0\nschema: v1\nmodels:\n  - {first}" + "".join(f"    {line}" for line in others)


def _launch_codex(endpoint: Endpoint) -> tuple[list[str], dict[str, str]]:
    return ["codex", *(word for line in _codex(endpoint).splitlines() for word in ("-c", line))], {}


def _launch_opencode(endpoint: Endpoint) -> tuple[list[str], dict[str, str]]:
    return ["opencode", "--model", f"mlxlm/{endpoint.model}"], {"OPENCODE_CONFIG_CONTENT": _opencode(endpoint)}


CLIENTS = {
    "claude": Client(
        "npm install -g @anthropic-ai/claude-code", "~/.claude/mlxlm.json", _claude, "claude --settings {file}"
    ),
    "codex": Client(
        "npm install -g @openai/codex",
        "~/.codex/mlxlm.config.toml",
        _codex,
        "codex --profile mlxlm",
        launch=_launch_codex,
    ),
    "opencode": Client(
        "npm install -g opencode-ai",
        "~/.config/opencode/opencode.json",
        _opencode,
        "opencode --model mlxlm/{model}",
        merge=True,
        launch=_launch_opencode,
    ),
    "aider": Client("pip install aider-chat", "~/.aider.mlxlm.yml", _aider, "aider --config {file}"),
    "continue": Client(
        "npm install -g @continuedev/cli", "~/.continue/agents/mlxlm.yaml", _continue, "cn --config {file}"
    ),
    "zed": Client("https://zed.dev", "~/.config/zed/settings.json", _zed, "zed", merge=True),
}
