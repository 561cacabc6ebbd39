"""`mlxlm serve`: the APIs of OpenAI and Anthropic over HTTP, and a chat page."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.backend import platform
from mlxlm.cli.generation_options import given_options, kv_options, sampling_options, speculation_options
from mlxlm.cli.model_options import MODEL, offline_option
from mlxlm.cli.options import SIZE, SectionedCommand, allow_sleep_option, is_given, option
from mlxlm.cli.render import say
from mlxlm.cli.spinner import spinner
from mlxlm.config.option import declaration, options_of
from mlxlm.generation.options import GenerationOptions
from mlxlm.utils.errors import one_line

if TYPE_CHECKING:
    from mlxlm.cache import KVOptions
    from mlxlm.generation.speculative import SpeculativeDecoder

_EPILOG = """\b
Examples:
  mlxlm serve my-model
  mlxlm serve small=runs/stories large=org/name --max-memory 24GB
  MLXLM_API_KEY=$(cat key) mlxlm serve my-model --host 0.0.0.0
"""
_HOST = "Address to listen on; --api-key is required if others can reach it."
_API_KEY = "Accept only requests with this key. Repeatable. Others can see it in a list of processes; the environment "
_API_KEY += "variable MLXLM_API_KEY has the same effect."
_ALLOWED_HOST = "Also accept requests for this name of the machine. Repeatable."
_CORS_ORIGIN = "Let pages of this website use the API, such as https://example.org; * for any. Repeatable."
_MAX_MEMORY = "Memory for weights and caches; unused models are unloaded for others. The process itself needs 100 MB "
_MAX_MEMORY += "more.  [default: 3/4 of the machine's]"
_PREFIX_BYTES = "Memory for the beginnings of earlier prompts, which aren't read again; 0 disables it."
_PREFIX_DIR = "Keep them in FOLDER too, for the next start of the server."
_CHAT_TEMPLATE = "Chat template: chatml, llama3, plain, ... or a Jinja file.  [default: the model's]"
_MAX_WAITING = "Texts that may wait for their turn, per model; more are refused."
_LOG_LEVEL = "What to log to standard error."
_SHUTDOWN_TIMEOUT = "Seconds that running requests may take to finish after Ctrl-C or SIGTERM."
_PER_REQUEST = [name for name, field in options_of(GenerationOptions).items() if declaration(field).per_request]

_network = partial(option, "Network")
_memory = partial(option, "Memory and speed")
_other = partial(option, "Other")


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=MODEL)
@offline_option
@_network("--host", str, _HOST, default="127.0.0.1", metavar="ADDRESS")
@_network("--port", click.IntRange(0, 65535), "Port to listen on; 0 for a free one.", default=8080)
@_network("--api-key api_keys", str, _API_KEY, multiple=True, metavar="KEY")
@_network("--no-auth", bool, "With --host: let everybody who can reach it use the server, without a key.")
@_network("--allowed-host allowed_hosts", str, _ALLOWED_HOST, multiple=True, metavar="NAME", advanced=True)
@_network("--cors-origin cors_origins", str, _CORS_ORIGIN, multiple=True, metavar="ORIGIN", advanced=True)
@_memory("--max-memory", SIZE, _MAX_MEMORY, metavar="SIZE")
@_memory("--batch-size", click.IntRange(1), "Texts to generate at once, per model.", default=32)
@_memory("--max-waiting", click.IntRange(1), _MAX_WAITING, default=256, advanced=True)
@_memory("--prefix-cache-bytes", SIZE, _PREFIX_BYTES, metavar="SIZE", advanced=True)
@_memory("--prefix-cache-dir", click.Path(path_type=Path), _PREFIX_DIR, metavar="FOLDER", advanced=True)
@kv_options
@speculation_options
@sampling_options(without=_PER_REQUEST)
@allow_sleep_option("Other")
@_other("--chat-template", str, _CHAT_TEMPLATE, metavar="NAME", advanced=True)
@_other("--log-level", ["debug", "info", "warning", "error"], _LOG_LEVEL, default="info", advanced=True)
@_other("--shutdown-timeout", click.IntRange(0), _SHUTDOWN_TIMEOUT, default=30, advanced=True)
def serve(
    models: Sequence[str],
    options: GenerationOptions,
    kv: KVOptions,
    speculation: Callable[[], SpeculativeDecoder] | None,
    **flags: Any,
) -> None:
    """Serve models over HTTP, with the APIs of OpenAI and Anthropic and a chat page: see docs/server.md.

    MODEL is a name of mlxlm models, a model folder, a run, a hub id, or a .gguf or llama2.c .bin file. Requests name it
    by its last part, or by NAME for NAME=MODEL. A single model is loaded at the start; several are loaded when they are
    first used.

    \f

    Sampling options are the defaults of requests that don't set them, before those of a model's generation_config.json.
    Ctrl-C stops the server when the running requests have finished; a second Ctrl-C stops it at once.
    """  # noqa: D301 - click's form feed: --help ends there
    paths = _named(models)
    keys = _api_keys(flags["api_keys"])
    if len(paths) > 1 and is_given("draft_model"):
        raise click.UsageError("--draft-model needs a single MODEL")
    from mlxlm.checkpoint.resolve import fetch
    from mlxlm.server import run
    from mlxlm.server.app import make_app
    from mlxlm.server.models import Models, ModelSettings, load_model
    from mlxlm.server.security import AccessRules

    host = flags["host"]
    _check_access(host, keys, flags["no_auth"])
    rules = AccessRules.for_host(host, keys, flags["allowed_hosts"], flags["cors_origins"])
    max_memory = platform.total_memory() * 3 // 4 if flags["max_memory"] is None else flags["max_memory"]
    names = ("batch_size", "max_waiting", "prefix_cache_bytes", "prefix_cache_dir", "chat_template")
    others = {name: flags[name] for name in names}
    with run.bind(host, flags["port"]) as listener:
        if speculation is not None and is_given("draft_model"):
            decoder = speculation()  # before the spinner of the model, which can't have another one inside
            speculation = lambda: decoder  # noqa: E731
        settings = ModelSettings(
            given_options(options), kv=kv, make_speculation=speculation, max_memory=max_memory, **others
        )
        for path in paths.values():
            fetch(path)
        served = Models(paths, settings)
        if len(paths) == 1:
            [(name, path)] = paths.items()
            with spinner(f"loading {one_line(path)}"):
                served.add(load_model(name, path, settings))
        _log_to_stderr(flags["log_level"])
        _greet(run.address_of(listener, host), list(paths), bool(keys))
        run.make_server(make_app(served, rules), flags["shutdown_timeout"], _on_signal).run([listener])


def _named(models: Sequence[str]) -> dict[str, str]:
    """{name: path or hub id} from MODEL or NAME=MODEL."""
    paths: dict[str, str] = {}
    for model in models:
        given, equals, path = model.partition("=")
        if not equals or os.path.exists(model):
            given, path = "", model
        exists = os.path.exists(path)
        name = given or (os.path.basename(os.path.abspath(path)) if exists else path)
        if name in paths:
            raise click.UsageError(f"there are two models {name} (try: NAME=MODEL to give one another name)")
        paths[name] = os.path.abspath(path) if exists else path
    return paths


def _api_keys(given: Sequence[str]) -> list[str]:
    keys = [*given, *filter(None, [os.environ.get("MLXLM_API_KEY")])]
    if any(not key.strip() or not key.isascii() or key != key.strip() for key in keys):
        raise click.UsageError("an API key has characters that a header can't have (try: letters and digits)")
    return keys


def _check_access(host: str, keys: Sequence[str], no_auth: bool) -> None:
    """Raise UsageError for a server that others can reach, unless it has a key or `no_auth` is given."""
    from mlxlm.server.security import is_loopback

    try:
        local = is_loopback(host)
    except OSError:
        raise click.UsageError(f"--host {host} is not an address of this machine (try: 127.0.0.1)") from None
    if no_auth and keys:
        raise click.UsageError("either --api-key (or MLXLM_API_KEY) or --no-auth")
    if not local and not keys and not no_auth:
        raise click.UsageError(f"others can reach {host}: set --api-key or MLXLM_API_KEY, or allow it with --no-auth")


def _log_to_stderr(level: str) -> None:
    """Log the server's messages with the time, and those of uvicorn that matter."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name, least in (("mlxlm", logging.DEBUG), ("uvicorn.error", logging.ERROR)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(max(getattr(logging, level.upper()), least))


def _greet(address: str, names: Sequence[str], has_key: bool) -> None:
    """Print where the server is, and a command to try it with."""
    header = ' -H "Authorization: Bearer $MLXLM_API_KEY"' if has_key else ""
    message = json.dumps({"model": names[0], "messages": [{"role": "user", "content": "Hello!"}]}, ensure_ascii=False)
    say(f"Serving {', '.join(map(one_line, names))} at {address}/v1, with a chat page at {address}/")
    say("Ctrl-C stops it. To try it in another terminal:")
    say(f"  curl {address}/v1/chat/completions{header} -H 'Content-Type: application/json' -d {shlex.quote(message)}")


def _on_signal(number: int) -> None:
    """Say what a signal does; at the second one end the process at once."""
    if number > 1:
        say("stopped; running requests were cut off")
        os._exit(130)  # waits for no thread
    say("stopping: running requests finish first; Ctrl-C again stops at once")
