"""Editors and agents that use a server of mlxlm, and what each needs to know: see docs/clients.md."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxlm.utils.errors import ConfigError

_ASK_SECONDS = 30  # a server that loads a model may be busy


@dataclass(frozen=True)
class Endpoint:
    """A model of a running server.

    Attributes:
        url: Address of the server, without /v1.
        model: Name of the model.
        context_length: Its maximum number of tokens; None if the server doesn't know it before it loads the model.
        key: The API key. Clients want one, also for a server without.
    """

    url: str
    model: str
    context_length: int | None = None
    key: str = "none"

    @classmethod
    def find(cls, server: str, model: str | None) -> Endpoint:
        """Ask a server for its models.

        Args:
            server: Its address, with or without /v1. The key is that of the environment variable MLXLM_API_KEY.
            model: A name; None for a model that is loaded, or else the first.

        Raises:
            ConfigError: No server answers, it refuses the key, or it has no such model.
        """
        url = server.rstrip("/").removesuffix("/v1")
        key = os.environ.get("MLXLM_API_KEY") or "none"
        try:
            request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"})
            with urllib.request.urlopen(request, timeout=_ASK_SECONDS) as response:
                listed = {entry["id"]: entry for entry in json.load(response)["data"]}
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise ConfigError(f"the server at {url} needs its key", "MLXLM_API_KEY=KEY") from None
            raise ConfigError(f"{url}/v1/models: {error.code} {error.reason}", "the address of mlxlm serve") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = getattr(error, "reason", None) or error
            raise ConfigError(f"no server of models at {url}: {reason}", "mlxlm serve, or --server URL") from None
        if model is None:
            model = next((name for name, entry in listed.items() if entry.get("loaded")), next(iter(listed), None))
        if model is None or model not in listed:
            raise ConfigError(f"the server has no model {model}", ", ".join(listed) or "mlxlm serve MODEL")
        return cls(url, model, listed[model].get("context_length"), key)


@dataclass(frozen=True)
class Client:
    """An editor or agent.

    Attributes:
        program: Its command.
        install: How to install it.
        path: Its configuration file; `~` is the home folder, and environment variables may move it.
        settings: The content of that file.
        command: How it is started with that file.
        merge: Whether the file has other settings, too, in JSON; else it is ours alone.
        arguments: Arguments with which it uses a server without that file; None if there are none.
        environment: Environment variables for the same.
    """

    program: str
    install: str
    path: str
    settings: Callable[[Endpoint], str]
    command: str
    merge: bool = False
    arguments: Callable[[Endpoint], list[str]] | None = None
    environment: Callable[[Endpoint], Mapping[str, str]] = field(default=lambda endpoint: {})

    @property
    def file(self) -> Path:
        """The configuration file, where it is on this machine."""
        folders = {"~/.config": "XDG_CONFIG_HOME", "~/.codex": "CODEX_HOME", "~/.claude": "CLAUDE_CONFIG_DIR"}
        for default, variable in folders.items():
            if self.path.startswith(default) and (folder := os.environ.get(variable)):
                return Path(folder + self.path.removeprefix(default))
        return Path(self.path).expanduser()


def _to_json(settings: Any) -> str:
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _claude(endpoint: Endpoint) -> str:
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU")))
    variables = {"ANTHROPIC_BASE_URL": endpoint.url, "ANTHROPIC_AUTH_TOKEN": endpoint.key}
    variables |= dict.fromkeys(names, endpoint.model)
    if endpoint.context_length:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(endpoint.context_length)
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(endpoint.context_length)
    variables["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    variables["CLAUDE_CODE_ATTRIBUTION_HEADER"] = "0"  # else each prompt begins with another text: no prefix is cached
    return _to_json({"env": variables})


def _codex(endpoint: Endpoint) -> str:
    values: dict[str, Any] = {"model": endpoint.model, "model_provider": "mlxlm"}
    if endpoint.context_length:
        values["model_context_window"] = endpoint.context_length
    provider = {"name": "mlxlm", "base_url": f"{endpoint.url}/v1", "wire_api": "responses"}
    if endpoint.key != "none":
        provider["env_key"] = "MLXLM_API_KEY"
    values |= {f"model_providers.mlxlm.{name}": value for name, value in provider.items()}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())  # TOML


def _opencode(endpoint: Endpoint) -> str:
    model: dict[str, Any] = {"name": endpoint.model, "tool_call": True}
    if length := endpoint.context_length:
        model["limit"] = {"context": length, "output": min(length // 4, 8192)}
    options = {"baseURL": f"{endpoint.url}/v1", "apiKey": endpoint.key}
    provider: dict[str, Any] = {"npm": "@ai-sdk/openai-compatible", "name": "mlxlm", "options": options}
    provider["models"] = {endpoint.model: model}
    return _to_json({"$schema": "https://opencode.ai/config.json", "provider": {"mlxlm": provider}})


def _aider(endpoint: Endpoint) -> str:
    values: dict[str, Any] = {"model": f"openai/{endpoint.model}", "openai-api-base": f"{endpoint.url}/v1"}
    values |= {"openai-api-key": endpoint.key, "show-model-warnings": False}
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items())  # YAML


def _zed(endpoint: Endpoint) -> str:
    model: dict[str, Any] = {"name": endpoint.model, "display_name": endpoint.model}
    model["max_tokens"] = endpoint.context_length or 8192  # which Zed needs
    model["capabilities"] = {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False}
    provider = {"api_url": f"{endpoint.url}/v1", "available_models": [model]}
    return _to_json({"language_models": {"openai_compatible": {"mlxlm": provider}}})


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


CLIENTS = {
    "claude": Client(
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        path="~/.claude/mlxlm.json",
        settings=_claude,
        command="claude --settings {file}",
        arguments=lambda endpoint: ["--settings", _claude(endpoint)],
    ),
    "codex": Client(
        program="codex",
        install="npm install -g @openai/codex",
        path="~/.codex/mlxlm.config.toml",
        settings=_codex,
        command="codex --profile mlxlm",
        arguments=lambda endpoint: [word for line in _codex(endpoint).splitlines() for word in ("-c", line)],
    ),
    "opencode": Client(
        program="opencode",
        install="npm install -g opencode-ai",
        path="~/.config/opencode/opencode.json",
        settings=_opencode,
        command="opencode --model mlxlm/{model}",
        merge=True,
        arguments=lambda endpoint: [],
        environment=lambda endpoint: {
            "OPENCODE_CONFIG_CONTENT": _to_json({**json.loads(_opencode(endpoint)), "model": f"mlxlm/{endpoint.model}"})
        },
    ),
    "aider": Client(
        program="aider",
        install="pip install aider-chat",
        path="~/.aider.mlxlm.yml",
        settings=_aider,
        command="aider --config {file}",
        arguments=lambda endpoint: ["--model", f"openai/{endpoint.model}", "--no-show-model-warnings"],
        environment=lambda endpoint: {"OPENAI_API_BASE": f"{endpoint.url}/v1", "OPENAI_API_KEY": endpoint.key},
    ),
    "continue": Client(
        program="cn",
        install="npm install -g @continuedev/cli",
        path="~/.continue/agents/mlxlm.yaml",
        settings=_continue,
        command="cn --config {file}",
    ),
    "zed": Client(
        program="zed",
        install="https://zed.dev",
        path="~/.config/zed/settings.json",
        settings=_zed,
        command="zed",
        merge=True,
    ),
}
