"""`mlxlm generate --jsonl`."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm import batch, generate
from mlxlm.cli import jsonl, render
from mlxlm.cli.jsonl import JobProgress, LineReader
from mlxlm.generation import load
from mlxlm.generation.gumbel_noise import derive_seed
from tests.run_command import run_command
from tests.small_models import write_folder

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture(scope="module")
def folder(lm, tiny_tokenizer, tmp_path_factory):
    """A model's folder; it has a chat template."""
    folder = write_folder(tmp_path_factory.mktemp("jsonl") / "tiny", lm.model, lm.config, tiny_tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return str(folder)


@pytest.fixture
def requests(tmp_path):
    """`requests(line, ...)`: the path of a file of them; a dict is written as JSON."""

    def write(*lines):
        path = tmp_path / "in.jsonl"
        path.write_bytes(
            b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        )
        return str(path)

    return write


@pytest.fixture
def run(folder):
    """`run(*arguments)`: the exit code, standard output and standard error of `mlxlm generate`."""

    def run(*arguments):
        done = run_command("generate", folder, "-n", 6, *arguments)
        return done.returncode, done.stdout, done.stderr.decode()

    return run


def parsed(out):
    return [json.loads(line) for line in out.splitlines()]


SEVERAL = [{"id": f"r{n}", "prompt": "the cat sat on a mat and saw two birds"[: 3 + 5 * n]} for n in range(7)]
BAD = {"id": "bad", "prompt": "x", "temprature": 1}


def test_a_result_for_each_request(run, requests, folder):
    code, out, err = run("--jsonl", requests(*SEVERAL), "-t", "1")
    assert (code, err) == (0, "")
    found = {value["id"]: value for value in parsed(out)}
    assert set(found) == {f"r{n}" for n in range(7)}
    lm = load(folder)
    for request in SEVERAL:
        seed = derive_seed(0, request["id"], 0)
        alone = generate(lm, request["prompt"], seed=seed, temperature=1, max_tokens=6)
        assert len(found[request["id"]].pop("request")) == 12
        wanted = {"id": request["id"], "text": alone.text, "finish_reason": alone.finish_reason, "seed": seed}
        counts = {"tokens": len(alone.tokens), "prompt_tokens": alone.prompt_tokens}
        assert found[request["id"]] == wanted | counts


def test_results_depend_only_on_the_request(run, requests, tmp_path):
    """Byte-identical lines at any batch size, in any order, resumed or not."""
    lines = [*SEVERAL, {"id": "s", "prompt": "old garden", "num_samples": 3}, BAD]
    arguments = ["-t", "1", "--seed", "4"]
    wanted = sorted(
        line for line in run("--jsonl", requests(*lines), *arguments)[1].splitlines() if b"error" not in line
    )
    shuffled = random.Random(1).sample(lines, len(lines))
    for size in (1, 2):
        _, out, _ = run("--jsonl", requests(*shuffled), *arguments, "--batch-size", size)
        assert sorted(line for line in out.splitlines() if b"error" not in line) == wanted, size
    kept = tmp_path / "out.jsonl"
    kept.write_bytes(b"\n".join(wanted[::2]) + b"\n" + wanted[1][:20])
    assert run("--jsonl", requests(*lines), *arguments, "--resume", kept)[0] == 1
    assert sorted(line for line in kept.read_bytes().splitlines() if b"error" not in line) == wanted


def test_ordered(run, requests):
    lines = [{"id": n, "prompt": "the cat", "max_tokens": 9 - n} for n in range(8)]
    lines.insert(3, BAD)
    lines.insert(5, {"id": "s", "prompt": "x", "num_samples": 2})
    _, out, _ = run("--jsonl", requests(*lines), "--ordered", "--batch-size", "4")
    found = [(value["id"], value.get("sample")) for value in parsed(out)]
    assert found == [(i, None) for i in (0, 1, 2, "bad", 3)] + [("s", 0), ("s", 1)] + [(i, None) for i in (4, 5, 6, 7)]


def test_errors_are_results(run, requests):
    lines = [
        {"id": "a", "prompt": "the cat"},
        b"{oops\n",
        BAD,
        {"id": "long", "prompt": "x " * 300},
        {"id": "a", "prompt": "y"},
    ]
    code, out, err = run("--jsonl", requests(*lines), "--ordered")
    a, oops, bad, long, again = parsed(out)
    assert code == 1 and a["text"]
    assert err.startswith("error: 4 of 5 results failed; the reason is in their lines (try: fix those requests ")
    assert "a larger max_tokens or other stop strings for a constraint_error" in err
    assert oops["id"] is None and oops["line"] == 2 and oops["error"].startswith("the line is not JSON")
    assert bad == {"id": "bad", "line": 3, "error": 'there is no field "temprature" (try: temperature)'}
    assert long["id"] == "long" and "context length is 128" in long["error"]
    assert again == {"id": "a", "line": 5, "error": 'line 1 has the id "a", too (try: an id for each request)'}


def test_resuming_repeats_failed_and_missing_requests(run, requests, tmp_path):
    out = tmp_path / "out.jsonl"
    assert run("--jsonl", requests(*SEVERAL[:3], BAD, b'{"id": "r3", '), "--resume", out)[0] == 1
    first = out.read_bytes()
    assert first.count(b'"error"') == 2
    with out.open("ab") as file:
        file.write(b'{"id": "r4", "te')
    code, printed, err = run("--jsonl", requests(*SEVERAL, BAD), "--resume", out, "-v")
    assert (code, printed) == (1, b"") and "5 results, 1 failed, 3 skipped" in err
    mended = {"id": "bad", "prompt": "x"}
    code, _, err = run("--jsonl", requests(*SEVERAL, mended), "--resume", out, "-v")
    assert code == 0 and "1 result, 7 skipped" in err
    assert out.read_bytes().startswith(b"".join(line + b"\n" for line in first.splitlines() if b"error" not in line))
    assert sorted(value["id"] for value in parsed(out.read_bytes())) == ["bad", *(f"r{n}" for n in range(7))]


@pytest.mark.parametrize(
    ("lines", "arguments"),
    [
        ([{"id": "a", "prompt": "the"}], ["--seed", "7"]),
        ([{"id": "a", "prompt": "the"}], ["--max-kv-size", "64"]),
        ([{"id": "new", "prompt": "the"}, {"id": "a", "prompt": "The"}], []),
    ],
)
def test_resuming_with_other_requests_is_refused(run, requests, tmp_path, lines, arguments):
    out = tmp_path / "out.jsonl"
    assert run("--jsonl", requests({"id": "a", "prompt": "the"}), "--resume", out)[0] == 0
    before = out.read_bytes()
    code, _, err = run("--jsonl", requests(*lines), "--resume", out, *arguments)
    assert code == 1 and 'the results for the id "a" are those of another request (try: ' in err
    assert out.read_bytes().startswith(before)


def test_a_template_is_compiled_once(run, requests, tmp_path, monkeypatch):
    from mlxlm.chat import chat_template

    compiled = []
    real = chat_template.ChatTemplate.__init__
    monkeypatch.setattr(
        chat_template.ChatTemplate, "__init__", lambda self, *args: (compiled.append(1), real(self, *args))[1]
    )
    conversation = {"messages": [{"role": "user", "content": "the cat?"}]}
    assert run("--jsonl", requests(conversation, conversation, {"prompt": "x"}))[0] == 0
    assert len(compiled) == 1
    assert run("--jsonl", requests({"prompt": "x"}))[0] == 0
    assert len(compiled) == 1  # not needed
    code, out, err = run("--jsonl", requests({"prompt": "x"}), "--chat-template", "nosuch")
    assert (code, out) == (1, b"") and err.startswith("error: there is no chat template nosuch")


def test_num_samples_can_be_raised_later(run, requests, tmp_path):
    out, path = tmp_path / "out.jsonl", requests({"id": "a", "prompt": "the"}, {"id": "b", "prompt": "cat"})
    run("--jsonl", path, "--num-samples", "2", "--resume", out)
    assert run("--jsonl", path, "--num-samples", "3", "--resume", out)[0] == 0
    fresh = run("--jsonl", path, "--num-samples", "3")[1]
    assert sorted(out.read_bytes().splitlines()) == sorted(fresh.splitlines())
    assert len({value["seed"] for value in parsed(fresh)}) == 6


def test_resuming_into_another_file_is_refused(run, requests):
    path = requests({"id": "a", "prompt": "the"})
    code, out, err = run("--jsonl", path, "--resume", path)
    assert (code, out) == (1, b"") and err.startswith(f"error: line 1 of {path} is not a result")


def test_blank_lines_carriage_returns_and_a_byte_order_mark(run, requests):
    path = requests(b'\xef\xbb\xbf{"prompt": "the"}\r\n', b"\r\n  \n", b'{"prompt": "cat"}\r\n', b'{"prompt": "sat"}')
    assert sorted(value["id"] for value in parsed(run("--jsonl", path)[1])) == [1, 4, 5]


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_no_requests(run, requests, tmp_path, content):
    assert run("--jsonl", requests(content)) == (0, b"", "")
    assert run("--jsonl", requests(content), "--resume", tmp_path / "out")[0] == 0
    assert not (tmp_path / "out").exists()


def test_messages(run, requests, folder):
    messages = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "the cat?"}]
    lines = [
        {"id": "m", "messages": messages},
        {"id": "s", "messages": messages[1:], "system_prompt": "Brief."},
        {"id": "d", "messages": messages[1:]},
        {"id": "p", "prompt": "the cat?"},
    ]
    path = requests(*lines)
    _, out, _ = run("--jsonl", path, "--system-prompt", "Brief.", "-t", "0")
    texts = {value["id"]: value.get("text", value.get("error")) for value in parsed(out)}
    assert texts["p"].startswith("a prompt without a chat can't have a system prompt")
    _, out, _ = run("-p", "the cat?", "--chat", "--system-prompt", "Brief.", "-t", "0")
    assert texts["m"] == texts["s"] == texts["d"] == out.decode()[:-1]
    _, out, _ = run("--jsonl", path, "--chat", "--system-prompt", "Brief.", "-t", "0")
    assert {value["text"] for value in parsed(out)} == {texts["m"]}


def test_logprobs(run, requests):
    _, out, _ = run(
        "--jsonl", requests({"id": 1, "prompt": "the", "logprobs": 2}, {"id": 2, "prompt": "the"}), "--ordered"
    )
    first, second = parsed(out)
    assert len(first["logprobs"]) == first["tokens"] == 6 and "logprobs" not in second
    said = b"".join(bytes(entry["bytes"]) for entry in first["logprobs"])
    assert said.decode("utf-8", "replace") == first["text"]


def test_constraints(run, requests, tiny_tokenizer):
    space, endless = {tiny_tokenizer.encode(" ", continues=True)[0]: 100}, {tiny_tokenizer.eos_token_id: -1000}
    lines = [
        {"id": "whole", "prompt": "the", "choice": ["yes", "no"]},
        {"id": "cut", "prompt": "the", "regex": "[a-z]{200}", "max_tokens": 2},
        {"id": "stopped", "prompt": "the", "regex": "yes(;no)?", "stop": [";"], "logit_bias": endless},
        {"id": "json", "prompt": "the", "json_schema": {"const": [1, 2]}, "logit_bias": space, "max_tokens": 20},
        {"id": "none", "prompt": "the", "choice": []},
    ]
    code, out, err = run("--jsonl", requests(*lines), "--ordered")
    whole, cut, stopped, listed, none = parsed(out)
    assert whole["text"] in ("yes", "no") and "constraint_error" not in whole
    assert cut["constraint_error"] and cut["finish_reason"] == "length"
    assert (stopped["text"], stopped["finish_reason"], stopped.get("constraint_error")) == ("yes", "stop", None)
    assert (listed["text"], listed["finish_reason"]) == ("[1, 2]", "eos")
    assert none["error"].startswith("choice is an empty list")
    assert code == 1 and "2 of 5 results failed" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--jsonl", "/no/file"], 1, "error: cannot read /no/file: No such file or directory"),
        (["--jsonl", "."], 1, "error: . is a folder (try: a file with one request per line)"),
        (["--jsonl", "-", "-p", "x"], 2, "--jsonl has its own prompts"),
        (["--jsonl", "-", "--json"], 2, "no --prompt, no --json"),
        (["--jsonl", "-", "--prompt-lookup"], 2, "--prompt-lookup needs a single text"),
        (["--jsonl", "-", "--prompt-cache-file", "x"], 2, "--prompt-cache-file needs a single text"),
        (["--jsonl", "-", "--num-samples", "0"], 2, "0 is not in the range"),
        (["--jsonl", "-", "--resume", ""], 2, "--resume takes the name of a file"),
        (["--jsonl", "-", "--resume", "-"], 2, "--resume takes the name of a file"),
        (["--jsonl", "-", "--resume", "x", "--ordered"], 2, "either --ordered or --resume"),
        (["-p", "x", "--ordered"], 2, "--ordered needs --jsonl"),
        (["-p", "x", "--resume", "y"], 2, "--resume needs --jsonl"),
        (["-p", "x", "--batch-size", "3"], 2, "--batch-size needs --jsonl or --num-samples"),
    ],
)
def test_wrong_usage(run, arguments, code, message):
    status, out, err = run(*arguments)
    assert (status, out) == (code, b"") and message in err


def test_results_equal_those_of_batch(run, requests, folder):
    """The same texts for the same seeds: a prompt's number is the id of a request without one."""
    prompts = ["the cat", "old garden"]
    _, out, _ = run(
        "--jsonl", requests(*({"prompt": p} for p in prompts)), "--ordered", "--num-samples", 2, "--seed", 4
    )
    results = batch(load(folder), prompts, num_samples=2, seed=4, max_tokens=6)
    assert [value["text"] for value in parsed(out)] == [result.text for result in results]


@pytest.fixture
def start(folder):
    """`start(*arguments)`: the command in a process of its own, with pipes."""
    processes = []

    def start(*arguments, **settings):
        code = "from mlxlm.cli.main import main; main()"
        command = [sys.executable, "-c", code, "generate", folder, "-n", "6", "--jsonl", *map(str, arguments)]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
        processes.append(subprocess.Popen(command, **streams))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def ask(process, value):
    process.stdin.write(json.dumps(value).encode() + b"\n")
    process.stdin.flush()


def test_an_open_pipe_is_answered_line_by_line(start):
    process = start("-")
    for n in range(3):
        ask(process, {"id": n, "prompt": "the"} if n != 1 else {"id": n})
        assert json.loads(process.stdout.readline())["id"] == n
    for n in (3, 4):
        ask(process, {"id": n, "prompt": "the"})
    assert {json.loads(process.stdout.readline())["id"] for _ in range(2)} == {3, 4}
    ask(process, {"id": 5, "prompt": "cat"})
    process.stdin.close()
    assert json.loads(process.stdout.readline())["id"] == 5
    assert process.wait(60) == 1 and process.stderr.read().startswith(b"error: 1 of 6 results failed")


def test_a_broken_pipe_ends_quietly(start):
    process = start("-")
    ask(process, {"id": 0, "prompt": "the"})
    process.stdout.readline()
    process.stdout.close()
    ask(process, {"id": 1, "prompt": "the"})
    assert process.wait(60) == 0 and process.stderr.read() == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_in_the_middle_and_resumed(start, run, requests, tmp_path, number):
    lines = [{"id": n, "prompt": "the cat sat"[: n % 9 + 2], "max_tokens": 40} for n in range(9)]
    path, out = requests(*lines), tmp_path / "out.jsonl"
    arguments = ["--resume", out, "-t", "1"]
    process = start("-", *arguments, "--batch-size", "2", preexec_fn=_handle_interrupts)
    for line in lines[:6]:  # it waits for more
        ask(process, line)
    while not out.exists() or out.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    code, err = process.wait(60), process.stderr.read().decode()
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -9}[number]
    if number != signal.SIGKILL:
        assert err == f"finished results are in {out}; the same command continues from there\ninterrupted\n"
    done = out.read_bytes().count(b"\n")
    assert 3 <= done <= 6
    assert run("--jsonl", path, *arguments, "-v")[0] == 0
    fresh = run("--jsonl", path, "-t", "1")[1]
    assert sorted(out.read_bytes().splitlines()) == sorted(fresh.splitlines())


def _handle_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_full_disk_is_one_line(start, requests):
    with open("/dev/full", "wb") as full:
        process = start(requests({"prompt": "the"}), stdin=subprocess.DEVNULL, stdout=full)
        assert process.wait(60) == 1
    assert process.stderr.read() == b"error: No space left on device\n"


COLOURFUL = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}


def test_only_results_and_no_color(start, requests, run, monkeypatch):
    process = start(requests(*SEVERAL), stdin=subprocess.DEVNULL, env=os.environ | COLOURFUL)
    out, err = process.communicate(timeout=60)
    assert err == b"" and b"\x1b" not in out and len(parsed(out)) == 7
    for name, value in COLOURFUL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("mlxlm.cli.render.console", type(render.console)(stderr=True, highlight=False, soft_wrap=True))
    for one in (["-p", "the"], ["-p", "the", "--num-samples", "2"], ["--jsonl", requests({"prompt": "the"})]):
        code, out, err = run(*one, "-v")
        assert code == 0 and "tokens" in err and "\x1b" not in err and b"\x1b" not in out


@pytest.mark.parametrize(
    ("closed", "code", "out", "err"),
    [
        ("2>&-", 1, b'{"id": null, "line": 1, "error": "the line is not a JSON object', b""),
        (">&-", 1, b"", b"error: standard output is closed (try: a file, or /dev/null)\n"),
    ],
)
def test_closed_streams(folder, closed, code, out, err):
    command = f'"$0" -c "from mlxlm.cli.main import main; main()" generate "$1" --jsonl - -v {closed}'
    done = subprocess.run(["bash", "-c", command, sys.executable, folder], input=b"[]\n", capture_output=True)
    assert done.returncode == code and done.stdout.startswith(out) and done.stdout.count(b"\n") == bool(out)
    assert done.stderr == err


def test_json_output_is_utf8_without_control_characters(run, monkeypatch):
    """UTF-8 whatever the locale, and nothing that a terminal obeys."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    arguments = ["-p", "the", "-n", "40", "--json", "--choice", "\x9b31m\u2028ü"]
    for more in ([], ["--num-samples", "2"]):
        _, out, _ = run(*arguments, *more)
        assert "\\u009b31m\\u2028ü".encode() in out and b"\xc2\x9b" not in out


@pytest.fixture
def pipe():
    """(lines of a pipe, its writing end as a function; None closes it)."""
    reading, writing = os.pipe()

    def write(data):
        if data is None:
            os.close(writing)
        else:
            os.write(writing, data)

    yield LineReader(reading, 100), write
    os.close(reading)


def test_only_lines_that_have_arrived(pipe):
    lines, write = pipe
    assert lines.read_line(0) is None and not lines.ended
    write(b"one\ntwo\nth")
    assert [lines.read_line(0), lines.read_line(0), lines.read_line(0)] == [(1, b"one"), (2, b"two"), None]
    write(b"ree")
    assert lines.read_line(0) is None and not lines.ended
    write(b"\n\nlast")
    assert [lines.read_line(None), lines.read_line(None), lines.read_line(0)] == [(3, b"three"), (4, b""), None]
    write(None)
    assert lines.read_line(None) == (5, b"last")
    assert lines.read_line(None) is None and lines.ended


def test_the_timeout(pipe):
    lines, write = pipe
    start = time.monotonic()
    assert lines.read_line(0.05) is None
    assert time.monotonic() - start >= 0.05
    threading.Timer(0.05, write, [b"late\n"]).start()
    assert lines.read_line(None) == (1, b"late")
    write(None)


def test_a_long_line_is_cut(pipe):
    lines, write = pipe
    for _ in range(50):
        write(b"x" * 50)
        assert lines.read_line(0) is None
    write(b"x\nnext\n")
    assert lines.read_line(0) == (1, b"x" * 101)
    assert lines.read_line(0) == (2, b"next")
    write(None)


@given(st.binary(max_size=300), st.integers(1, 7))
def test_all_lines_of_any_file(tmp_path_factory, content, longest):
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    lines = LineReader(descriptor, longest)
    found = []
    while (taken := lines.read_line(0)) is not None:
        found.append(taken)
    os.close(descriptor)
    wanted = content.split(b"\n")
    wanted = wanted if wanted[-1] else wanted[:-1]
    assert lines.ended and found == [(n, line[: longest + 1]) for n, line in enumerate(wanted, 1)]


def test_the_total_follows_the_lines():
    job_progress = JobProgress(2, 10)
    assert job_progress.expected == 20
    for rows in (2, 0, 1, 5):
        job_progress.expect(rows)
    assert job_progress.expected == 20 + 0 - 2 - 1 + 3
    job_progress.results, job_progress.skipped, job_progress.tokens = 4, 6, 1000
    assert job_progress.line().startswith("10 of 20 done, ") and job_progress.line().endswith(" left")


def test_a_line_per_minute_without_a_terminal(capsys, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(jsonl.time, "monotonic", lambda: clock[0])
    job_progress = JobProgress(2, None)
    with jsonl.progress(job_progress) as show:
        for _ in range(180):
            clock[0] += 1
            job_progress.results, job_progress.tokens = job_progress.results + 1, job_progress.tokens + 10
            show()
    assert capsys.readouterr().err == "".join(f"{n} done, 10 tokens/s\n" for n in (60, 120, 180))
