"""Options of the server: of its models, and of the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mlxlm.config.option import option, range_problems
from mlxlm.utils.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")
_network = partial(option, section="Network")
_memory = partial(option, section="Memory and speed")
_other = partial(option, section="Other")


@dataclass(frozen=True)
class ModelOptions:
    """Options that all models of a server share. Sizes are bytes.

    Raises:
        ConfigError: Naming every option that can't work.
    """

    max_memory: int | None = _memory(
        None,
        "Memory for weights and caches; unused models are unloaded for others. The process itself needs 100 MB more.",
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
    chat_template: str | None = _other(
        None, "Chat template: chatml, llama3, plain, ... or a Jinja file.", metavar="NAME", default_text="the model's"
    )

    def __post_init__(self) -> None:
        if problems := list(range_problems(self)):
            raise ConfigError("invalid server options: " + "; ".join(problems))


@dataclass(frozen=True)
class ServerOptions(ModelOptions):
    """Options of `mlxlm serve` besides those of sampling, the cache and speculative decoding."""

    host: str = _network(
        "127.0.0.1",
        "Address to listen on; --api-key is required if others can reach it.",
        common=True,
        metavar="ADDRESS",
    )
    port: int = _network(8080, "Port to listen on; 0 for a free one.", common=True, low=0, high=65535, metavar="N")
    api_keys: Sequence[str] = _network(
        (),
        "Accept only requests with this key. Others can see it in a list of processes; the environment variable "
        "MLXLM_API_KEY has the same effect.",
        common=True,
        names="--api-key",
        metavar="KEY",
    )
    no_auth: bool = _network(
        False, "With --host: let everybody who can reach it use the server, without a key.", common=True
    )
    allowed_hosts: Sequence[str] = _network(
        (), "Also accept requests for this name of the machine.", names="--allowed-host", metavar="NAME"
    )
    cors_origins: Sequence[str] = _network(
        (),
        "Let pages of this website use the API, such as https://example.org; * for any.",
        names="--cors-origin",
        metavar="ORIGIN",
    )
    responses_dir: Path | None = _other(
        None,
        "Keep answers of the Responses API in FOLDER, too, so that clients can continue them after a restart.",
        metavar="FOLDER",
    )
    strict: bool = _other(False, "Refuse requests with unknown parameters instead of ignoring these.")
    log_level: str = _other("info", "What to log to standard error.", choices=LOG_LEVELS)
    shutdown_timeout: int = _other(
        30, "Seconds that running requests may take to finish after Ctrl-C or SIGTERM.", low=0, metavar="N"
    )
