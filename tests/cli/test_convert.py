"""convert, inspect and compare as a person meets them."""

import json

import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint import save_weights
from mlxlm.cli.main import _run
from mlxlm.config import ModelConfig
from mlxlm.families import config_to_hf
from mlxlm.model import Decoder
from mlxlm.utils.json_files import write_json


@pytest.fixture(autouse=True)
def few_greedy_tokens(monkeypatch):
    monkeypatch.setattr("mlxlm.convert.verify.NUM_GREEDY_TOKENS", 8)


@pytest.fixture
def model(tmp_path, tiny_tokenizer):
    config = ModelConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
        vocab_size=320, max_position_embeddings=128, tie_word_embeddings=True,
    )  # fmt: skip
    decoder = Decoder(config)
    decoder.init_weights(0)
    folder = tmp_path / "model"
    folder.mkdir()
    save_weights(folder, {name: w.astype(mx.float16) for name, w in tree_flatten(decoder.parameters())})
    write_json(folder / "config.json", config_to_hf(config))
    tiny_tokenizer.save(folder)
    return folder


def run(capsys, *arguments) -> tuple[int, str, str]:
    capsys.readouterr()
    code = _run(list(map(str, arguments)))
    return code, *capsys.readouterr()


def test_convert_says_what_it_wrote_and_verified(model, tmp_path, capsys):
    code, out, _ = run(capsys, "convert", model, "--out", tmp_path / "out")
    assert code == 0
    first, *checks = out.splitlines()
    assert first.startswith(f"{tmp_path / 'out'}: ") and "parameters at 16.00 bits each (float16)" in first
    assert checks[0] == "tensors: equal, to the bit" and len(checks) == 5
    code, out, _ = run(capsys, "convert", model, "--out", tmp_path / "out.gguf", "--outtype", "q8_0", "--json")
    report = json.loads(out)
    assert code == 0 and report["dtype"] == "Q8_0" and report["checks"][0]["result"] == "within rounding"
    code, out, _ = run(capsys, "convert", model, "--out", tmp_path / "quick", "--no-verify", "--dtype", "bfloat16")
    assert code == 0 and out.splitlines()[1:] == ["not verified"] and "(bfloat16)" in out


def test_options_without_an_effect_are_wrong_usage(model, tmp_path, capsys):
    for out, options in (
        ("out", ["--outtype", "f16"]), ("out.bin", ["--outtype", "f16"]), ("out.gguf", ["--dtype", "float16"]),
        ("out.bin", ["--dtype", "float16"]), ("out", ["--no-verify", "--cross-check"]),
    ):  # fmt: skip
        code, _, err = run(capsys, "convert", model, "--out", tmp_path / out, *options)
        assert code == 2 and "would have no effect" in err
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_output_that_exists_is_refused_before_any_work(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("mlxlm.convert.conversion.open_checkpoint", lambda source: 1 / 0)
    code, out, err = run(capsys, "convert", model, "--out", model)
    assert code == 1 and out == "" and f"{model} already exists (try: another name for the output)" in err


def test_inspect(model, capsys):
    code, out, err = run(capsys, "inspect", model)
    shown = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert code == 0 and err == ""
    assert shown["layers"] == "2, width 64" and shown["types"].startswith("F16 ")
    assert "4 heads of 16 on 2 key-value heads" in shown["attention"] and "run by mlxlm's own" in shown["family"]
    code, out, _ = run(capsys, "inspect", model, "--json", "--tensors")
    facts = json.loads(out)
    assert facts["bits_per_weight"] == 16 and facts["quantization"] is None
    assert {"name": "model.norm.weight", "type": "F16", "shape": "64", "bytes": 128} in facts["tensor_list"]


def test_inspect_obeys_nothing_that_a_file_says(model, capsys):
    values = json.loads((model / "config.json").read_text())
    plan = {"bits": 0, "mode": "affine", "x\x1b[2J": {"bits": "y"}}
    write_json(model / "config.json", {**values, "model_type": "\x1b[31mmamba\nerror", "quantization": plan})
    code, out, _ = run(capsys, "inspect", model)
    assert code == 0 and "\x1b" not in out and "\\x1b[31mmamba error, can't be run: " in out


def test_inspect_says_why_mlx_lm_runs_a_model(model, capsys):
    values = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", {**values, "model_type": "smollm3"})
    code, out, _ = run(capsys, "inspect", model)
    assert code == 0 and "smollm3, run by mlx_lm: " in out


def test_compare(model, tmp_path, capsys):
    assert run(capsys, "convert", model, "--out", tmp_path / "q4.gguf", "--outtype", "q4_0")[0] == 0
    code, out, _ = run(capsys, "compare", model, tmp_path / "q4.gguf", "--tokens", "200")
    assert code == 0
    assert out.startswith("KL ") and "top-1 agreement" in out and "worst layers model." in out
    assert "bits per weight" in out and "largest errors, weights" in out
    (tmp_path / "text.txt").write_text("the cat sat on a mat " * 20)
    code, out, _ = run(capsys, "compare", model, model, "--json", "--eval-text", tmp_path / "text.txt")
    found = json.loads(out)
    assert code == 0 and found["identical"] and found["kl"] == 0 and found["weights"]["only_a"] == []
    code, out, _ = run(capsys, "compare", model, model, "--eval-text", tmp_path / "text.txt")
    assert out.startswith("identical: ")
    messages = [{"role": "user", "content": "the cat sat on"}, {"role": "assistant", "content": "a mat " * 20}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}))
    code, out, _ = run(capsys, "compare", model, model, "--eval-text", tmp_path / "chat.jsonl")
    assert code == 0 and out.startswith("identical: ")


@pytest.mark.parametrize("rows", [False, True])
def test_a_text_has_one_figure_in_all_commands(model, tmp_path, make_text, capsys, rows):
    text = tmp_path / ("text.jsonl" if rows else "text.txt")
    content = make_text(700)
    text.write_text("".join(json.dumps({"text": part}) + "\n" for part in (content, "the cat")) if rows else content)
    _, out, _ = run(capsys, "evaluate", model, text, "--json")
    evaluated = json.loads(out)
    _, out, _ = run(capsys, "compare", model, model, "--eval-text", text, "--json")
    compared = json.loads(out)
    settings = ("--group-size", "32", "--eval-text", text, "--no-verify", "--json")
    _, out, _ = run(capsys, "quantize", model, "--out", tmp_path / "out", *settings)
    measured = json.loads(out)["metrics"]
    assert evaluated["tokens"] > 2 * evaluated["context_length"]
    for found in (compared, measured):
        assert [found[name] for name in ("tokens", "context_length", "stride")] == [
            evaluated[name] for name in ("tokens", "context_length", "stride")
        ]
    figures = [compared["bits_per_byte_a"], measured["bits_per_byte_before"]]
    assert figures == pytest.approx([evaluated["bits_per_byte"]] * 2, rel=1e-6)


def test_compare_needs_one_tokenizer(model, tmp_path, make_text, capsys):
    from mlxlm.tokenizer import train

    assert run(capsys, "convert", model, "--out", tmp_path / "other", "--no-verify")[0] == 0
    train([make_text(3000).upper()], 300).save(tmp_path / "other")
    code, _, err = run(capsys, "compare", model, tmp_path / "other")
    assert code == 1 and "make other tokens of the same text" in err


def test_kinds_of_files_are_those_of_the_library():
    from mlxlm.cli.convert import convert
    from mlxlm.convert.output_formats import DTYPES, OUTTYPES

    choices = {option.name: option.type.choices for option in convert.params if hasattr(option.type, "choices")}
    assert [outtype.upper() for outtype in choices["outtype"]] == list(OUTTYPES)
    assert list(choices["dtype"]) == list(DTYPES)


def test_outputs_and_sources_that_are_no_names(model, tmp_path, capsys):
    for arguments in (["", "--out", tmp_path / "a"], [model, "--out", ""], [model, "--out", f"{tmp_path}/y.gguf/"]):
        assert run(capsys, "convert", *arguments)[0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_inspect_names_equal_layers_once(model, capsys):
    weights = mx.load(str(model / "model.safetensors"))
    mx.eval(weights)
    plan = {"bits": 4, "group_size": 32, "mode": "affine"}
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        stem = name.removesuffix(".weight")
        bits = 8 if "v_proj" in name or "down_proj" in name else 4
        if bits == 8:
            plan[stem] = {"bits": 8, "group_size": 32}
        packed = mx.quantize(weights.pop(name), 32, bits)
        weights |= {f"{stem}.{part}": w for part, w in zip(("weight", "scales", "biases"), packed, strict=True)}
    plan["model.embed_tokens"] = False
    (model / "model.safetensors").unlink()
    save_weights(model, weights)
    values = json.loads((model / "config.json").read_text())
    write_json(model / "config.json", {**values, "quantization": plan})
    code, out, _ = run(capsys, "inspect", model)
    [line] = [line for line in out.splitlines() if "affine 8 bits" in line]
    assert code == 0 and sorted(line.split("32 ")[1].split(", ")) == [
        "model.layers.*.mlp.down_proj", "model.layers.*.self_attn.v_proj",
    ]  # fmt: skip


def test_a_table_ends_as_lines_do_when_its_reader_is_gone(monkeypatch):
    from mlxlm.cli import render

    class Gone:
        encoding = "utf-8"

        def isatty(self):
            return False

        def write(self, _text):
            raise BrokenPipeError

        flush = fileno = lambda self: 1

    monkeypatch.setattr("sys.stdout", Gone())
    with pytest.raises(BrokenPipeError):
        render.print_result(render.table([("a", 1)]))


def test_long_lines_hang_below_their_heading_on_a_terminal(monkeypatch):
    from mlxlm.cli import render

    assert render.hanging_indent("attention ", "word " * 30) == "attention " + "word " * 30
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    lines = render.hanging_indent("attention      ", "key-value " * 9).splitlines()
    assert len(lines) > 1 and all(len(line) <= 50 for line in lines)
    assert all(line.startswith(" " * 15 + "key-value") for line in lines[1:])
