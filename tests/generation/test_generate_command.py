"""`mlxlm generate`: streams, exit codes, one-line errors."""

import io
import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest
from mlx.utils import tree_flatten

from mlxlm._mlx import mx
from mlxlm.cli.main import main
from mlxlm.cli.sampling_options import sampling_options
from mlxlm.generation import GenerationOptions, generate, load


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(loaded.config.to_dict()))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(loaded.model.parameters())))
    loaded.tokenizer.save(folder)
    return str(folder)


@pytest.fixture
def run(capsys, monkeypatch):
    """`run(*arguments, stdin=b"")` -> exit code, standard output, standard error."""

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as stop:
            main(["generate", *arguments])
        return stop.value.code, *capsys.readouterr()

    return run


def test_the_text_and_nothing_else(run, folder):
    wanted = generate(load(folder), "The quick", temperature=0, max_tokens=20).text
    assert run(folder, "-p", "The quick", "-t", "0", "-n", "20") == (0, wanted + "\n", "")


def test_the_prompt_from_a_pipe(run, folder):
    expected = run(folder, "--prompt", "The quick", "-t", "0", "-n", "9")
    assert run(folder, "--prompt", "-", "-t", "0", "-n", "9", stdin=b"The quick\n") == expected
    assert run(folder, "-t", "0", "-n", "9", stdin=b"The quick") == expected


def test_json(run, folder):
    code, out, err = run(folder, "-p", "The", "--seed", "5", "-n", "8", "--temperature", "1", "--json")
    value = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert value["text"] == generate(load(folder), "The", seed=5, max_tokens=8, temperature=1).text
    assert (value["tokens"], value["prompt_tokens"], value["seed"]) == (8, len(load(folder).tokenizer.encode("The")), 5)
    assert value["finish_reason"] == "length"
    assert value["timings"]["first_token_seconds"] > 0 and value["timings"]["peak_memory_bytes"] > 0


def test_every_setting_reaches_the_text(run, folder):
    """Each changes the answer of a fixed seed."""
    base = ["-p", "The quick brown", "--seed", "1", "-n", "25", "-t", "4"]
    plain = run(folder, *base)[1]
    for change in (
        ["-t", "0.5"], ["--top-k", "2"], ["--top-p", "0.2"], ["--min-p", "0.5"], ["--repetition-penalty", "2"],
        ["--seed", "2"], ["-n", "5"], ["--stop", plain[3]],
    ):  # fmt: skip
        assert run(folder, *base, *change)[1] != plain, change
    penalty = [*base, "--repetition-penalty", "2"]
    assert run(folder, *penalty, "--repetition-window", "1")[1] != run(folder, *penalty)[1]


def test_statistics_on_standard_error(run, folder):
    code, out, err = run(folder, "-p", "The", "-t", "0", "-n", "5", "-v")
    assert code == 0 and out == run(folder, "-p", "The", "-t", "0", "-n", "5")[1]
    assert "answer 5 tokens" in err and "ended by length" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", ""], 1, "error: the prompt is empty (try: some text to continue)"),
        (["-p", "-"], 1, "error: the prompt is empty"),
        (["-p", "x", "-t", "-1", "--top-p", "0"], 1, "temperature is -1.0 (0 for greedy, or 0.001 to 100); top_p"),
        (["-p", "x", "-n", "0"], 1, "max_tokens is 0"),
        (["-p", "x " * 200], 1, "the model's context of 128 has no room for more (try: a prompt of at most 127"),
        (["-p", "x", "--chat"], 1, "has no chat template (try: the same without --chat)"),
        (["-p", "x", "--system", "y"], 2, "--system needs --chat"),
        (["-p", "x", "-t", "warm"], 2, "not a valid float"),
    ],
)
def test_bad_input_is_one_line(run, folder, arguments, code, message):
    status, out, err = run(folder, *arguments)
    assert (status, out) == (code, "")
    assert message in err
    assert code == 2 or err.count("\n") == 1


def test_bad_bytes_and_missing_models(run, folder, tmp_path):
    assert run(folder, stdin=b"ab\xff")[::2] == (
        1, "error: standard input is not UTF-8: invalid start byte at byte 2 (try: a text file in UTF-8)\n"
    )  # fmt: skip
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
    assert run(str(chat), "-p", "Hello!", "--chat", "--system", "Be brief.", *options) == (0, wanted + "\n", "")


def test_the_help_tells_the_true_defaults(run):
    help_text = " ".join(run("--help")[1].split())
    for field in fields(GenerationOptions):
        shown = field.default if isinstance(field.default, int | float) else {"seed": "drawn"}.get(field.name)
        assert f"--{field.name.replace('_', '-')} " in help_text
        assert shown is None or f"[default: {shown}]" in help_text


def test_options_are_the_fields_of_generation_options():
    command = sampling_options(lambda options: None)
    assert {p.name for p in command.__click_params__} == {f.name for f in fields(GenerationOptions)}


def test_heavy_packages_are_not_imported():
    script = (
        "import sys, mlxlm.generation, mlxlm.chat.terminal\n"
        "print([m for m in ('transformers', 'mlx_lm', 'rich', 'prompt_toolkit', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
