"""`mlxlm serve`: the APIs of OpenAI and Anthropic over HTTP, and a chat page."""

from __future__ import annotations

import json
import logging
import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from mlxlm.backend import platform
from mlxlm.cache.options import KVOptions
from mlxlm.checkpoint.download import resolve
from mlxlm.cli.distributed import current_workers, hosts_option
from mlxlm.cli.generation_options import Speculation, given_options, kv_options, sampling_options, speculation_options
from mlxlm.cli.options import (
    MODEL,
    SIZE,
    SectionedCommand,
    adapter_option,
    add_options,
    allow_sleep_option,
    field_option,
    flag,
    given_values,
    is_given,
    offline_option,
)
from mlxlm.cli.render import say, spinner
from mlxlm.config.option import declaration, options_of
from mlxlm.generation.options import GenerationOptions
from mlxlm.server.options import DEFAULT_PORT, OLLAMA_PORT, ModelOptions, ServerOptions
from mlxlm.utils.errors import ConfigError, one_line

_EPILOG = """\b
Examples:
  mlxlm serve
  mlxlm serve small=runs/stories large=org/name --max-memory 24GB
  MLXLM_API_KEY=$(cat key) mlxlm serve my-model --host 0.0.0.0
"""
_MAX_SHOWN = 8  # names of models at the start
_PER_REQUEST = [name for name, field in options_of(GenerationOptions).items() if declaration(field).per_request]
_KINDS = {"max_memory": SIZE, "prefix_cache_bytes": SIZE}
_FIELDS = sorted(options_of(ServerOptions).values(), key=lambda field: declaration(field).section != "Network")
_server_options = add_options(*(field_option(field, kind=_KINDS.get(field.name)) for field in _FIELDS))


@click.command(cls=SectionedCommand, epilog=_EPILOG)
@click.argument("models", nargs=-1, metavar="[MODEL]...", type=MODEL)
@offline_option
@_server_options
@adapter_option("Models", advanced=True)
@kv_options
@speculation_options
@hosts_option
@sampling_options(without=_PER_REQUEST)
@allow_sleep_option("Other")
def serve(
    models: Sequence[str],
    adapter: Path | None,
    options: GenerationOptions,
    kv: KVOptions,
    speculation: Speculation,
    **flags: Any,
) -> None:
    """Serve models over HTTP, with the APIs of OpenAI and Anthropic and a chat page: see docs/server.md.

    MODEL is a name of mlxlm models, a model folder, a run, a hub id, or a .gguf or llama2.c .bin file. Requests name it
    by its last part, or by NAME for NAME=MODEL. Without MODEL, all models on this machine are served. A single model
    is loaded at the start; others are loaded when they are first used.

    \f

    Sampling options are the defaults of requests that don't set them, before those of a model's generation_config.json.
    Ctrl-C stops the server when the running requests have finished; a second Ctrl-C stops it at once.
    """  # noqa: D301 - click's form feed: --help ends there
    try:
        server = ServerOptions(**given_values(flags))
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    paths = _named(models)
    if paths and server.models_dirs:
        raise click.UsageError("either MODEL or --models-dir, which serves all models on this machine")
    for folder in server.models_dirs:
        if not os.path.isdir(folder):
            raise click.UsageError(f"--models-dir {folder} is not a folder")
    keys = [*server.api_keys, *filter(None, [os.environ.get("MLXLM_API_KEY")])]
    if any(not key.strip() or not key.isascii() or key != key.strip() for key in keys):
        raise click.UsageError("an API key has characters that a header can't have (try: letters and digits)")
    for name in ("draft_model", "adapter", "hosts"):
        if len(paths) != 1 and is_given(name):
            raise click.UsageError(f"{flag(name)} needs a single MODEL")
    from mlxlm.checkpoint import hub, open_checkpoint
    from mlxlm.server import run
    from mlxlm.server.app import make_app
    from mlxlm.server.logs import log_to_stderr
    from mlxlm.server.memory import limit_process
    from mlxlm.server.models import Models, ModelSettings, load_model
    from mlxlm.server.security import AccessRules

    _check_access(server.host, keys, server.no_auth)
    rules = AccessRules.for_host(server.host, keys, server.allowed_hosts, server.cors_origins)
    default_port = OLLAMA_PORT if server.ollama else DEFAULT_PORT
    with run.bind(server.host, default_port if server.port is None else server.port) as listener:
        if speculation is not None and is_given("draft_model"):
            decoder = speculation()  # before the spinner of the model, which can't have another one inside
            speculation = lambda: decoder  # noqa: E731
        shared = {name: getattr(server, name) for name in options_of(ModelOptions)}
        shared["max_memory"] = server.max_memory or platform.total_memory() * 3 // 4
        settings = ModelSettings(
            **shared,
            defaults=given_options(options),
            kv=kv,
            make_speculation=speculation,
            adapter=adapter,
            workers=current_workers(),
            process_bytes=limit_process(shared["max_memory"]),
        )
        for name, source in paths.items():
            found = resolve(source)  # downloads what isn't here
            open_checkpoint(found)  # an error for what is no model
            if hub.is_id(source):  # which isn't looked up on the hub again
                paths[name] = str(found)
        served = Models(paths, settings)
        served.library.check_aliases()
        if len(paths) == 1:
            [(name, path)] = paths.items()
            with spinner(f"loading {one_line(path)}"):
                served.add(load_model(name, path, settings))
        log_to_stderr(server.log_level, server.log_format)
        is_json = server.log_format == "json"
        tell = logging.getLogger("mlxlm.server").info if is_json else say
        address = run.address_of(listener, server.host)
        tell(f"Serving {_shown(served.library.names)} at {address}/v1, with a chat page at {address}/")
        if not is_json:
            _suggest_curl(address, served.library.first(), bool(keys))
        app = make_app(served, rules, strict=server.strict)
        run.make_server(app, server.shutdown_timeout, partial(_on_signal, tell), server.idle_timeout).run([listener])


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


def _shown(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = [f"{len(names) - _MAX_SHOWN} more"] if len(names) > _MAX_SHOWN else []
    return ", ".join([*map(one_line, names[:_MAX_SHOWN]), *more])


def _suggest_curl(address: str, name: str, has_key: bool) -> None:
    """Print a command to try the server with."""
    header = ' -H "Authorization: Bearer $MLXLM_API_KEY"' if has_key else ""
    message = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello!"}]}, ensure_ascii=False)
    say("Ctrl-C stops it. To try it in another terminal:")
    say(f"  curl {address}/v1/chat/completions{header} -H 'Content-Type: application/json' -d {shlex.quote(message)}")


def _on_signal(tell: Callable[[str], None], number: int) -> None:
    """Say what a signal does; at the second one end the process at once."""
    if number > 1:
        tell("stopped; running requests were cut off")
        os._exit(130)  # waits for no thread
    tell("stopping: running requests finish first; Ctrl-C again stops at once")
