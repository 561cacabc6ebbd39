"""Options of the server: of its models, and of the network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlxlm.config.option import option, range_problems
from mlxlm.utils.errors import ConfigError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)", re.ASCII)
_NUMBER, _DURATION = re.compile(r"-?\d+(\.\d+)?", re.ASCII), re.compile(rf"-?({_PART.pattern})+", re.ASCII)
_FOR_EVER = 1e9  # seconds; timers of asyncio have no more
DEFAULT_PORT, OLLAMA_PORT = 8080, 11434
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error")
_network = partial(option, section="Network")
_memory = partial(option, section="Memory and speed")
_models = partial(option, section="Models")
_other = partial(option, section="Other")


@dataclass(frozen=True)
class ModelOptions:
    """Options that all models of a server share. Sizes are bytes.

    Raises:
        ConfigError: Naming every option that can't work.
    """

    max_memory: int | None = _memory(
        None,
        "Memory of the whole process; idle models are unloaded for others.",
        common=True,
        above=0,
        metavar="SIZE",
        default_text="3/4 of the machine's",
    )
    batch_size: int = _memory(32, "Texts to generate at once, per model.", common=True, low=1, metavar="N")
    max_waiting: int = _memory(
        256, "Texts that may wait for their turn, per model; more are refused.", low=1, metavar="N"
    )
    prefix_cache_bytes: int | None = _memory(
        None,
        "Memory for the beginnings of earlier prompts, which aren't read again; 0 disables it.",
        low=0,
        metavar="SIZE",
    )
    prefix_cache_dir: Path | None = _memory(
        None, "Keep them in FOLDER too, for the next start of the server.", metavar="FOLDER"
    )
    models_dirs: Sequence[str] = _models(
        (), "Without MODEL, serve those in FOLDER, too.", common=True, names="--models-dir", metavar="FOLDER"
    )
    aliases: Sequence[str] = _models(
        (),
        "Another name of a model; *=MODEL for all unknown names.",
        common=True,
        names="--alias",
        metavar="NAME=MODEL",
    )
    keep_alive: str | None = _models(
        None,
        "Unload a model this long after its last request: 5m, 0 for at once, -1 for never.",
        common=True,
        metavar="TIME",
        default_text="30m; -1 for MODEL",
    )
    chat_template: str | None = _other(
        None, "Chat template: chatml, llama3, plain, ... or a Jinja file.", metavar="NAME", default_text="the model's"
    )

    def __post_init__(self) -> None:
        problems = list(range_problems(self))
        try:
            parse_keep_alive(self.keep_alive or 0)
            for alias in self.aliases:
                parse_alias(alias)
        except ConfigError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError("invalid server options: " + "; ".join(problems))


def parse_keep_alive(value: float | str) -> float | None:
    """How long a model stays loaded, in seconds; None for ever.

    Args:
        value: Seconds, or a text with units, such as "1h30m"; below 0 for ever.

    Raises:
        ConfigError: It is something else.
    """
    text = str(value).strip()
    seconds = None
    if _NUMBER.fullmatch(text):
        seconds = float(text)
    elif _DURATION.fullmatch(text):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
        seconds = -seconds if text.startswith("-") else seconds
    if seconds is None or isinstance(value, bool):
        raise ConfigError(f"keep_alive is {value!r:.40}", "5m, a number of seconds, 0, or -1 for ever")
    return seconds if 0 <= seconds < _FOR_EVER else None


def parse_alias(text: str) -> tuple[str, str]:
    """Split NAME=MODEL. Raises ConfigError for something else."""
    alias, _, name = text.partition("=")
    if not alias or not name:
        raise ConfigError(f"alias is {text!r:.80}", "NAME=MODEL, such as gpt-4o=small-world, or *=small-world")
    return alias, name


@dataclass(frozen=True)
class ServerOptions(ModelOptions):
    """Options of `mlxlm serve` besides those of sampling, the cache and speculative decoding."""

    host: str = _network(
        "127.0.0.1",
        "Address to listen on; --api-key is required if others can reach it.",
        common=True,
        metavar="ADDRESS",
    )
    port: int | None = _network(
        None,
        "Port to listen on; 0 for a free one.",
        common=True,
        low=0,
        high=65535,
        metavar="N",
        default_text=f"{DEFAULT_PORT}, or {OLLAMA_PORT} with --ollama",
    )
    ollama: bool = _network(False, f"Listen on ollama's port, {OLLAMA_PORT}, where its clients look.", common=True)
    api_keys: Sequence[str] = _network(
        (),
        "Accept only requests with this key. MLXLM_API_KEY does the same, without showing it in the list of processes.",
        common=True,
        names="--api-key",
        metavar="KEY",
    )
    no_auth: bool = _network(False, "With --host: let everybody who can reach it use the server, without a key.")
    allowed_hosts: Sequence[str] = _network(
        (), "Also accept requests for this name of the machine.", names="--allowed-host", metavar="NAME"
    )
    cors_origins: Sequence[str] = _network(
        (),
        "Let pages of this website use the API, such as https://example.org; * for any.",
        names="--cors-origin",
        metavar="ORIGIN",
    )
    strict: bool = _other(False, "Refuse requests with unknown parameters instead of ignoring these.")
    log_level: str = _other("info", "What to log to standard error.", choices=LOG_LEVELS)
    log_format: str = _other("text", "Lines of text, or a JSON object per line.", choices=LOG_FORMATS)
    idle_timeout: int = _network(
        75, "Seconds after which a connection without a request is closed.", low=1, metavar="N"
    )
    shutdown_timeout: int = _other(
        30, "Seconds that running requests may take to finish after Ctrl-C or SIGTERM.", low=0, metavar="N"
    )
