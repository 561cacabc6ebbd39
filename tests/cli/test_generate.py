"""`mlxlm generate`: streams, exit codes, one-line errors."""

import json
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest

from mlxlm import batch, generate, load
from mlxlm.cli.main import _run
from mlxlm.tokenizer import FillInTheMiddle, train
from tests.run_command import run as run_mlxlm
from tests.small_models import write_folder
from tests.tokenizer.test_fill_in_the_middle import QWEN, with_tokens


@pytest.fixture(scope="module")
def folder(lm, tmp_path_factory):
    return str(write_folder(tmp_path_factory.mktemp("models") / "tiny", lm.model, lm.config, lm.tokenizer))


@pytest.fixture
def run():
    """`run(*arguments, stdin=b"")`: the exit code, standard output and standard error of `mlxlm generate`."""
    return partial(run_mlxlm, "generate")


def test_only_the_text_is_printed(run, folder):
    wanted = generate(load(folder), "The quick", temperature=0, max_tokens=20).text
    assert run(folder, "-p", "The quick", "-t", "0", "-n", "20") == (0, wanted + "\n", "")


def test_the_models_generation_config_sets_defaults(run, lm, folder, tmp_path):
    theirs = shutil.copytree(folder, tmp_path / "theirs")
    (theirs / "generation_config.json").write_text('{"temperature": 5, "top_k": 2}')
    options = {"seed": 1, "max_tokens": 20, "temperature": 5, "top_k": 2}
    for arguments, given in ((), {}), (("--top-k", 3), {"top_k": 3}), (("-t", 0), {"temperature": 0}):
        expected = generate(lm, "The quick", **options | given).text + "\n"
        assert run(theirs, "-p", "The quick", "--seed", 1, "-n", 20, *arguments)[:2] == (0, expected)


def test_the_prompt_from_a_pipe(run, folder):
    expected = run(folder, "--prompt", "The quick", "-t", "0", "-n", "9")
    assert run(folder, "--prompt", "-", "-t", "0", "-n", "9", stdin=b"The quick\n") == expected
    for piped in (b"The quick", b"The quick\r\n", b"\xef\xbb\xbfThe quick\n"):
        assert run(folder, "-t", "0", "-n", "9", stdin=piped) == expected
    assert run(folder, "-t", "0", "-n", "9", stdin=b"The quick\r")[1] != expected[1]


def test_piped_input_comes_before_the_prompt(run, folder):
    arguments = [folder, "-t", "0", "-n", "9", "-p"]
    command = [sys.executable, "-c", "from mlxlm.cli.main import main; main()", "generate", *arguments, "quick"]
    done = subprocess.run(command, input="The\n", capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == run(*arguments, "The\n\nquick")


@pytest.mark.parametrize("arguments", [[], ["-p", "-"]])
def test_no_prompt(monkeypatch, capsys, folder, arguments):
    monkeypatch.setattr(sys, "stdin", None)
    assert _run(["generate", folder, *arguments]) == 2 and "there is no prompt" in capsys.readouterr().err


def test_json(run, folder):
    code, out, err = run(folder, "-p", "The", "--seed", "5", "-n", "8", "--temperature", "1", "--json")
    value = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert value["text"] == generate(load(folder), "The", seed=5, max_tokens=8, temperature=1).text
    assert (value["tokens"], value["prompt_tokens"], value["seed"]) == (8, len(load(folder).tokenizer.encode("The")), 5)
    assert value["finish_reason"] == "length"
    assert value["timings"]["time_to_first_token"] > 0 and value["timings"]["peak_memory_bytes"] > 0


def test_every_setting_reaches_the_text(run, folder):
    """Each changes the answer of a fixed seed."""
    base = ["-p", "The quick brown", "--seed", "1", "-n", "25", "-t", "4"]
    plain = run(folder, *base)[1]
    changes = "-t 0.5", "--top-k 2", "--top-p 0.2", "--min-p 0.5", "--repetition-penalty 2", "--seed 2", "-n 5"
    for change in (*map(str.split, changes), ["--stop", plain[3]]):
        assert run(folder, *base, *change)[1] != plain, change
    penalty = [*base, "--repetition-penalty", "2"]
    assert run(folder, *penalty, "--repetition-context-size", "1")[1] != run(folder, *penalty)[1]


def test_statistics_on_standard_error(run, folder):
    code, out, err = run(folder, "-p", "The", "-t", "0", "-n", "5", "-v")
    assert code == 0 and out == run(folder, "-p", "The", "-t", "0", "-n", "5")[1]
    assert "answer 5 tokens" in err and "finish reason length" in err


def test_suffix(run, lm, tmp_path):
    tokens = with_tokens(train(["The quick brown fox jumps over the lazy dog."], 264), QWEN)
    folder = write_folder(tmp_path / "code", lm.model, lm.config, tokens)
    middle = FillInTheMiddle(tokens)
    code = load(folder)
    wanted = generate(code, middle.encode("The", "dog"), temperature=0, max_tokens=8).text
    assert run(folder, "-p", "The", "--suffix", "dog", "-t", "0", "-n", "8")[:2] == (0, wanted + "\n")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "", "--chat", "--chat-template", "llama3"], 1, "error: "),
        (["-p", "-"], 1, "error: the prompt is empty"),
        (["-p", "x", "-t", "-1", "--top-p", "0"], 2, "temperature is -1.0, it must be 0 for greedy, or "),
        (["-p", "x", "-n", "0"], 2, "max_tokens is 0"),
        (["-p", "x " * 200], 1, "this model's maximum context length is 128 (try: at most 127"),
        (["-p", "x", "--chat"], 1, "has no chat template (try: a prompt to continue, or --chat-template "),
        (["-p", "x", "--chat-template", "chatml"], 2, "--chat-template needs --chat or --jsonl"),
        (["-p", "x", "--chat", "--chat-template", "chatml"], 1, "needs the tokens <|im_start|>, <|im_end|>"),
        (["-p", "x", "--kv-keep", "3"], 2, "--kv-keep needs --max-kv-size"),
        (["-p", "x", "--kv-bits", "3"], 2, "it must be one of 8, 4"),
        (["-p", "x", "--max-kv-size", "0"], 2, "size is 0"),
        (["-p", "x", "--draft-model", ""], 1, "the model name is empty"),
        (["-p", "x", "--prompt-lookup", "--num-samples", "2"], 2, "--prompt-lookup needs a single text"),
        (["-p", "x", "--prompt-lookup", "--deterministic"], 2, "--deterministic excludes --draft-model"),
        (["-p", "x", "--prompt-cache-file", "y", "--deterministic"], 2, "--deterministic excludes"),
        (["-p", "x", "--logprobs", "1"], 2, "--logprobs needs --json or --jsonl"),
        (["-p", "x", "--system-prompt", "y"], 2, "--system-prompt needs --chat"),
        (["-p", "x", "--suffix", "y", "--chat"], 2, "--suffix needs a prompt, not --chat or --jsonl"),
        (["-p", "x", "--suffix", "y"], 1, "this model can't fill in the middle"),
        (["-p", "x", "-t", "warm"], 2, "not a valid float"),
    ],
)
def test_wrong_input_is_one_line(run, folder, arguments, code, message):
    status, out, err = run(folder, *arguments)
    assert (status, out) == (code, "")
    assert message in err
    assert code == 2 or err.count("\n") == 1


def test_samples_equal_those_of_batch(run, folder):
    arguments = ["-p", "The quick", "-n", "8", "-t", "1", "--seed", "5", "--num-samples", "3"]
    wanted = batch(load(folder), ["The quick"], num_samples=3, seed=5, temperature=1, max_tokens=8)
    code, out, err = run(folder, *arguments, "-v")
    assert (code, out) == (0, "\n".join(result.text + "\n" for result in wanted))
    assert "3 texts, 24 tokens in" in err
    code, out, err = run(folder, *arguments, "--json", "--batch-size", "2")
    values = [json.loads(line) for line in out.splitlines()]
    assert [(v["sample"], v["text"], v["seed"]) for v in values] == [
        (n, result.text, result.seed) for n, result in enumerate(wanted)
    ]
    assert len({value["text"] for value in values}) == 3 and err == ""


def test_a_sample_is_reproduced_by_its_seed(run, folder):
    line = run(folder, "-p", "The quick", "-n", "8", "-t", "1", "--num-samples", "2", "--json")[1].splitlines()[1]
    alone = run(folder, "-p", "The quick", "-n", "8", "-t", "1", "--seed", json.loads(line)["seed"], "--json")[1]
    assert json.loads(alone)["text"] == json.loads(line)["text"]


def test_logprobs(run, folder):
    value = json.loads(run(folder, "-p", "The", "-n", "4", "--json", "--logprobs", "2")[1])
    lm = load(folder)
    tokens = generate(lm, "The", seed=value["seed"], max_tokens=4).tokens
    assert [entry["token"] for entry in value["logprobs"]] == tokens
    for entry in value["logprobs"]:
        assert entry["text"] == lm.tokenizer.token_bytes(entry["token"]).decode("utf-8", "replace")
        assert [set(top) for top in entry["top_logprobs"]] == [{"token", "text", "bytes", "logprob"}] * 2
        for shown in (entry, *entry["top_logprobs"]):
            assert bytes(shown["bytes"]) == lm.tokenizer.token_bytes(shown["token"])
        assert 0 >= entry["top_logprobs"][0]["logprob"] >= max(entry["top_logprobs"][1]["logprob"], entry["logprob"])


def test_the_cache_settings_reach_the_text(run, folder):
    arguments = ["-p", "The quick brown", "-n", "60", "-t", "0"]
    kept = [run(folder, *arguments, "--max-kv-size", size)[1] for size in ("16", "64")]
    assert kept[0] != kept[1] == run(folder, *arguments)[1]
    assert kept[0] == run(folder, *arguments, "--max-kv-size", "16", "--kv-keep", "4")[1]
    assert kept[0] != run(folder, *arguments, "--max-kv-size", "16", "--kv-keep", "8")[1]


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_speculative_decoding_changes_no_text(run, folder, temperature):
    arguments = ["-p", "The quick brown fox", "-n", "60", "-t", temperature, "--seed", "3"]
    plain = run(folder, *arguments)[1]
    for proposing in (["--prompt-lookup"], ["--draft-model", folder]):
        code, out, err = run(folder, *arguments, *proposing, "-v")
        assert (code, out) == (0, plain) and "proposed tokens accepted" in err
        value = json.loads(run(folder, *arguments, *proposing, "--json")[1])
        assert value["text"] + "\n" == plain
        assert 0 <= value["speculation"]["accepted"] <= value["speculation"]["proposed"]


def test_a_prompt_cache(run, folder, tmp_path):
    cache = str(tmp_path / "cache.safetensors")

    def text(prompt, *more):
        code, out, _ = run(folder, "-p", prompt, "-n", "5", "-t", "0", "--json", *more)
        value = json.loads(out)
        return code, value["text"], value["cached_tokens"]

    long = "The quick brown fox jumps over the lazy dog."
    tokens = len(load(folder).tokenizer.encode(long))
    fresh = text(long)
    assert fresh[2] == 0 and text(long, "--prompt-cache-file", cache) == fresh
    written = os.stat(cache).st_mtime_ns
    assert text(long, "--prompt-cache-file", cache) == (0, fresh[1], tokens - 1)
    assert os.stat(cache).st_mtime_ns == written  # nothing was read that it doesn't hold
    other = long.replace("dog", "cat")
    code, answer, cached = text(other, "--prompt-cache-file", cache)
    assert answer == text(other)[1] and 0 < cached < tokens - 1
    assert text(other, "--prompt-cache-file", cache)[2] == len(load(folder).tokenizer.encode(other)) - 1
    assert [path.name for path in tmp_path.iterdir()] == ["cache.safetensors"]


def test_a_seed_turns_neither_speculation_nor_the_prompt_cache_off(run, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxlm.generation.scheduler.margin_for", lambda kv: None)  # as on a GPU
    arguments = [folder, "-p", "The quick brown fox", "-n", "5", "--seed", "3", "--json"]
    assert json.loads(run(*arguments, "--prompt-lookup")[1])["speculation"] is not None
    cache = ["--prompt-cache-file", str(tmp_path / "cache.safetensors")]
    fresh, again = (json.loads(run(*arguments, *cache)[1]) for _ in range(2))
    assert fresh["cached_tokens"] == 0 < again["cached_tokens"] and again["text"] == fresh["text"]


def test_a_prompt_cache_is_saved_before_decoding(run, folder, tmp_path):
    """A bounded cache has dropped the prompt by the end of the text."""
    cache = str(tmp_path / "cache.safetensors")
    arguments = ["-n", "60", "--max-kv-size", "48", "--json", "--prompt-cache-file", cache]
    first, second = "The quick brown fox jumps over the lazy dog", "The quick brown fox jumps over the lazy cat"
    assert json.loads(run(folder, "-p", first, *arguments)[1])["cached_tokens"] == 0
    assert json.loads(run(folder, "-p", second, *arguments)[1])["cached_tokens"] > 10


def test_an_unwritable_prompt_cache_is_refused_first(run, folder, tmp_path):
    (tmp_path / "notes.txt").touch()
    code, out, err = run(folder, "-p", "The quick", "--prompt-cache-file", str(tmp_path / "notes.txt" / "x"))
    assert code == 1 and out.strip() == "" and err.startswith("error: cannot write ")


def test_another_file_is_not_overwritten_by_a_prompt_cache(run, folder, tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    code, out, err = run(folder, "-p", "The", "--prompt-cache-file", str(notes))
    assert (code, out) == (1, "") and err.startswith("error: ") and notes.read_text() == "my notes"


def test_an_incomplete_constrained_text_is_an_error(run, folder):
    code, out, err = run(folder, "-p", "The", "-n", "3", "--regex", "[a-z]{100}")
    assert code == 1 and out.count("\n") == 1 and err.startswith("error: ") and "(try: a larger --max-tokens)" in err
    code, out, err = run(folder, "-p", "The", "-n", "3", "--regex", "[a-z]{100}", "--num-samples", "2", "--json")
    assert code == 1 and all(json.loads(line)["constraint_error"] for line in out.splitlines()) and err.count("\n") == 1
    assert "(try: a larger --max-tokens)" in err
    code, out, err = run(folder, "-p", "The", "--regex", "yes;no", "--stop", ";")
    assert (code, out) == (1, "yes\n")
    assert err.startswith("error: a stop string ended the text before") and "(try: a --stop that" in err
    code, out, err = run(folder, "-p", "The", "--choice", "yes", "--choice", "no")
    assert (code, err) == (0, "") and out in ("yes\n", "no\n")


def test_wrong_encoding_and_missing_models(run, folder, tmp_path):
    code, _, err = run(folder, stdin=b"ab\xff")
    assert code == 1 and err.startswith("error: standard input is not UTF-8: invalid start byte at byte 2 (try: ")
    assert run(str(tmp_path / "none"), "-p", "x")[2].startswith("error: there is no model folder")


def test_chat_uses_the_template(run, folder, tmp_path):
    model = load(folder)
    model.tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    chat = tmp_path / "chat"
    chat.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.symlink(os.path.join(folder, name), chat / name)
    model.tokenizer.save(chat)
    ids = model.tokenizer.encode(
        "<|system|>Be brief.<|end|><|user|>Hello!<|end|>", add_special_tokens=False, parse_special=True
    )
    wanted = generate(model, ids, temperature=0, max_tokens=9).text
    options = ["-t", "0", "-n", "9"]
    assert run(str(chat), "-p", "Hello!", "--chat", "--system-prompt", "Be brief.", *options) == (0, wanted + "\n", "")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_help_has_sections(command):
    _, text, _ = run_mlxlm(command, "--help-all")
    wanted = ["Stopping:", "Sampling:", "Repetition penalties:", "Constrained output:", "Memory and speed:"]
    if command == "generate":
        wanted = ["docs/scripting.md", "Input:", "Output:", *wanted, "Options:", "Examples:"]
    places = [text.find(heading) for heading in wanted]
    assert -1 not in places and places == sorted(places)
    assert text.index("Repetition penalties:") < text.index("--dry-base") < text.index("Constrained output:")
    assert text.count("--seed") == text.count("--max-kv-size N ") == text.count("--help ") == 1


def test_heavy_packages_are_not_imported():
    script = (
        "import sys, mlxlm.generation, mlxlm.chat.terminal\n"
        "print([m for m in ('transformers', 'mlx_lm', 'rich', 'prompt_toolkit', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_an_empty_prompt_begins_a_text(run, folder):
    code, out, _ = run(folder, "-p", "", "-t", "0", "-n", "5", "--json")
    found = json.loads(out)
    lm = load(folder)
    ids = lm.tokenizer.prefix_token_ids or [lm.tokenizer.bos_token_id]
    assert code == 0 and found["prompt_tokens"] == len(ids) == 1


def test_an_empty_prompt_without_a_first_token_is_refused(run, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model/tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": None}))
    path = tmp_path / "model/tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    code, _, err = run(tmp_path / "model", "-p", "", "-n", "5")
    assert code == 1 and "the prompt is empty, and the model has no BOS token to begin with (try: text" in err
