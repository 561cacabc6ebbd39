"""Real clients, unchanged, that use `mlxlm serve`: which of their requests it accepts, and which fields it ignores.

    python benchmarks/clients.py [--path FOLDER ...] [--only NAME ...] [--tokenizer MODEL] [--save FOLDER]

Runs the clients whose programs or packages are on PATH or in the folders given, such as a node_modules/.bin and the bin
of a virtual environment; nothing is installed. A proxy between client and server records the requests. An agent gets
one tool call to make and then a text, which the server generates from a schema and a regular expression: the model has
random weights. The agents run with a home folder of their own, with the settings of `mlxlm launch`.

The column "prompt" has the tokens of an agent's first prompt with tools, counted with the tokenizer and the template of
--tokenizer MODEL.

--save FOLDER writes the distinct requests of each client as tests/server/captured has them: long texts are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
from client_jobs import LIBRARIES, Job, agents
from common import report
from serving import make_model, serve_command, serving

from mlxlm.cli.running_server import Endpoint

CONTEXT = 131_072
JOB_SECONDS = 300
HEADERS = ("anthropic-version", "anthropic-beta", "content-type", "openai-beta", "accept")  # that captures keep
_HOP_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding", "content-encoding"}
_MAX_TEXT, _MAX_WORD, _MAX_TOOLS = 24, 60, 4  # of captures: characters of a text and of a word; tools of a type


@dataclass
class Recorder:
    """A proxy that records requests.

    Attributes:
        upstream: The address of the server.
        job: What an agent is answered; None to pass all answers on.
        requests: The requests so far: method, path, headers, body, status, and the error of those refused.
    """

    upstream: str
    job: Job | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def run(self) -> Iterator[str]:
        """Serve in a thread; yields the address."""
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            def do_any(self) -> None:
                recorder.handle(self)

            do_GET = do_POST = do_DELETE = do_HEAD = do_any  # noqa: N815 - http.server's names

            def log_message(self, format: str, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Record a request and its status; answer it."""
        content = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in _HOP_HEADERS}
        try:
            body = json.loads(content) if content else None
        except ValueError:
            body = None
        kept = {name.lower(): value for name, value in headers.items() if name.lower() in HEADERS}
        request = {"method": handler.command, "path": handler.path, "headers": kept, "body": body}
        self.requests.append(request)
        scripted = None if self.job is None else script(handler.path, body, self.job)
        with httpx.Client(base_url=self.upstream, timeout=JOB_SECONDS, headers={"accept-encoding": "identity"}) as http:
            with http.stream(handler.command, handler.path, content=content, headers=headers) as response:
                request["status"] = response.status_code
                if response.status_code >= 400:
                    request["error"] = response.read().decode(errors="replace")[:400]
                if scripted is None or response.status_code >= 400:
                    self._pass_on(response, handler)
                    return
            with http.stream("POST", handler.path, json=scripted) as response:  # the first is left: it is cancelled
                self._pass_on(response, handler)

    @staticmethod
    def _pass_on(response: httpx.Response, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(response.status_code)
        for name, value in response.headers.items():
            if name not in _HOP_HEADERS:
                handler.send_header(name, value)
        handler.send_header("connection", "close")
        handler.end_headers()
        try:
            for chunk in [response.content] if response.is_stream_consumed else response.iter_bytes():
                handler.wfile.write(chunk)
        except OSError:
            pass  # the client has left


def script(path: str, body: Any, job: Job) -> dict[str, Any] | None:
    """A request whose answer is the tool call of a job, or its text once the tool has been called; None for others."""
    api = path.partition("?")[0].removeprefix("/v1")
    if api not in ("/chat/completions", "/responses", "/messages") or not isinstance(body, dict):
        return None
    values = {name: body[name] for name in ("model", "stream", "stream_options") if name in body}
    values |= {"input": "x"} if api == "/responses" else {"messages": [{"role": "user", "content": "x"}]}
    values |= {"max_tokens": 400} if api == "/messages" else {}
    text = json.dumps(body)
    called = any(mark in text for mark in ('"role": "tool"', '"tool_result"', 'call_output"'))
    name = next((name for name in job.tools if f'"name": "{name}"' in json.dumps(body.get("tools"))), None)
    if name is None or called:
        return {**values, "regex": re.escape(job.text)}
    arguments = {key: {"const": value} for key, value in job.tools[name].items()}
    schema = {"type": "object", "properties": arguments, "required": list(arguments), "additionalProperties": False}
    if api == "/messages":
        return {**values, "tools": [{"name": name, "input_schema": schema}], "tool_choice": {"type": "any"}}
    function = {"name": name, "parameters": schema}
    tool = {"type": "function", **(function if api == "/responses" else {"function": function})}
    return {**values, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", nargs="+", default=[], metavar="FOLDER", help="folders of programs, besides PATH")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"some of {', '.join([*agents(''), *LIBRARIES])}")
    parser.add_argument("--tokenizer", metavar="MODEL", help="a model whose tokenizer counts the tokens of prompts")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the distinct requests of each client")
    options = parser.parse_args()
    given = [os.path.abspath(folder) for folder in options.path]
    os.environ["NODE_PATH"] = os.pathsep.join(map(os.path.dirname, given))
    folders = os.pathsep.join([*given, os.environ["PATH"]])
    rows, results = [], {}
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = make_model(Path(folder, "tiny"), **sizes, num_key_value_heads=2, max_position_embeddings=CONTEXT)
        if options.tokenizer:
            give_tokenizer(model, options.tokenizer)
        for name in options.only or [*agents(""), *LIBRARIES]:
            work = Path(folder, name)
            work.mkdir()
            (notes := work / "notes.txt").write_text("The meeting is at noon.\n")
            job = {**agents(str(notes)), **LIBRARIES}[name]
            if (found := find(job, folders)) is None:
                print(f"{name} is not installed", file=sys.stderr)
                continue
            program, version = found
            results[name] = {"version": version, **measure(name, job, program, model, work, options)}
            line = "{version:<12} {sent:>4} {accepted:>8} {refused:>7} {prompt:>7}  {end}  {ignored}"
            rows.append((name, line.format(**results[name])))
    head = ("client", f"{'version':<12} sent accepted refused  prompt  end  ignored fields")
    report("clients", [head, *rows], {"benchmark": "clients", "clients": results})


def find(job: Job, folders: str) -> tuple[str, str] | None:
    """The program of a job and its version; for a library a Python or Node.js that can import it."""
    for folder in folders.split(os.pathsep):
        if path := shutil.which(job.program, path=folder):
            done = subprocess.run([path, *job.check], cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return path, "".join(re.findall(r"\d+(?:\.\d+)+", done.stdout)[:1])
    return None


def measure(name: str, job: Job, program: str, model: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a client with a server of its own, and count its requests."""
    home = work / "home"
    home.mkdir()
    with serving(lambda *where: [*serve_command(*where), "--log-level", "info"], model) as server:
        recorder = Recorder(server.url, job if job.tools else None)
        with recorder.run() as url:
            endpoint = Endpoint(url, model.name, CONTEXT)
            command, variables = job.start(endpoint, home)
            environment = {**os.environ, **variables, "HOME": str(home), "PWD": str(work)}
            environment["PATH"] = os.pathsep.join([str(Path(program).parent), os.environ["PATH"]])
            try:
                done = subprocess.run(
                    [program, *command[1:]], cwd=work, env=environment, timeout=JOB_SECONDS,
                    stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                )  # fmt: skip
                end, output = str(done.returncode), done.stdout + done.stderr
            except subprocess.TimeoutExpired as error:
                end, output = "time", str((error.stdout or b"")[-2000:])
        prompt = count_prompt(server.url, recorder.requests) if job.tools else ""
        log = server.log()
    for request in recorder.requests:
        if "error" in request:
            print(name, *(request[key] for key in ("method", "path", "status", "error")), file=sys.stderr)
    if end != "0":
        print(f"{name} ended with {end}: {output[-1500:]}", file=sys.stderr)
    if options.save:
        save(options.save / f"{name}.json", recorder.requests, {str(work): "/project", url: "http://127.0.0.1:8080"})
    refused = [request for request in recorder.requests if request["status"] >= 400]
    return {
        "sent": len(recorder.requests),
        "accepted": len(recorder.requests) - len(refused),
        "refused": len(refused),
        "prompt": prompt,
        "end": end,
        "ignored": ", ".join(sorted(set(re.findall(r"ignoring the parameter ([^ ]+)", log)))),
    }


def give_tokenizer(folder: Path, source: str) -> None:
    """Replace the tokenizer of a model that has random weights, and its embeddings."""
    import mlxlm
    from mlxlm.backend.mlx import mx
    from mlxlm.utils.json_files import write_json

    tokens = mlxlm.load(source).tokenizer
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "vocab_size": tokens.vocab_size})
    weights = mx.load(str(folder / "model.safetensors"))
    name = "model.embed_tokens.weight"
    weights[name] = mx.random.normal((tokens.vocab_size, weights[name].shape[1]))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tokens.save(folder)


def count_prompt(server: str, requests: Sequence[dict[str, Any]]) -> int:
    """The tokens of the prompt of the first request with tools, or of the first prompt."""
    prompts = [
        request for request in requests if script(request["path"], request["body"], Job("", lambda *_: ([], {})))
    ]
    request = next((request for request in prompts if request["body"].get("tools")), prompts[0])
    limit = "max_output_tokens" if "/responses" in request["path"] else "max_tokens"
    left_out = ("stream", "stream_options", "thinking", "max_completion_tokens")
    body = {name: value for name, value in request["body"].items() if name not in left_out}
    usage = httpx.post(server + request["path"], json={**body, limit: 1}, timeout=JOB_SECONDS).json()["usage"]
    names = ("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(name) or 0 for name in names)


def save(path: Path, requests: Sequence[dict[str, Any]], names: dict[str, str]) -> None:
    """Write requests that differ in more than their texts, with these texts replaced."""
    distinct: dict[str, str] = {}
    for request in requests:
        text = json.dumps({name: request[name] for name in ("method", "path", "headers", "body")}, ensure_ascii=False)
        for old, new in names.items():
            text = text.replace(old, new)
        short = json.loads(text)
        short["body"] = shorten(short["body"])
        distinct.setdefault(json.dumps(shape(short)), json.dumps(short, ensure_ascii=False))
    path.parent.mkdir(exist_ok=True)
    path.write_text("[\n" + ",\n".join(distinct.values()) + "\n]\n")


def shorten(value: Any, key: str = "") -> Any:
    """A request without bulk: long texts, descriptions and ids are replaced, and some tools left out."""
    if isinstance(value, dict):
        return {name: shorten(item, name) for name, item in value.items()}
    if isinstance(value, list):
        kinds = [isinstance(item, dict) and (item.get("type"), sorted(item)) for item in value]
        few = [item for n, item in enumerate(value) if key != "tools" or kinds[:n].count(kinds[n]) < _MAX_TOOLS]
        return [shorten(item, key) for item in few]
    if isinstance(value, str):
        if key in ("description", "instructions", "definition"):
            return f"The {key}."
        if re.search(r"[0-9a-f]{8}-[0-9a-f]{4}-|[0-9a-f]{24}", value):
            return "an id"
        return value if len(value) <= (_MAX_TEXT if " " in value else _MAX_WORD) else "A text."
    return value


def shape(value: Any, key: str = "") -> Any:
    """The fields and types of a request, without its texts."""
    if isinstance(value, dict):
        return {name: shape(item, name) for name, item in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(shape(item, key)) for item in value})
    return value if key in ("type", "role", "path", "method") else type(value).__name__


if __name__ == "__main__":
    main()
