"""`mlxlm convert`."""

import json

from tests.run_command import run


def test_the_report(model, tmp_path):
    code, out, _ = run("convert", model, "--out", tmp_path / "out")
    assert code == 0
    first, *checks = out.splitlines()
    assert first.startswith(f"{tmp_path / 'out'}: ") and "parameters at 16.00 bits each (float16)" in first
    assert checks[0] == "tensors: equal, to the bit" and len(checks) == 4
    code, out, _ = run("convert", model, "--out", tmp_path / "out.gguf", "--dtype", "q8_0", "--json")
    report = json.loads(out)
    assert code == 0 and report["dtype"] == "Q8_0" and report["checks"][0]["result"] == "within rounding"
    code, out, _ = run("convert", model, "--out", tmp_path / "quick", "--no-verify", "--dtype", "bfloat16")
    assert code == 0 and out.splitlines()[1:] == ["not verified"] and "(bfloat16)" in out


def test_importance_weights(model, tmp_path, make_text):
    text = tmp_path / "text.txt"
    text.write_text(make_text(1000), encoding="utf-8")
    options = ["convert", model, "--no-verify", "--dtype", "q3_k_m", "--out"]
    code, out, _ = run(*options, tmp_path / "a.gguf", "--calibration-text", text)
    assert code == 0 and "(Q3_K_M)" in out
    assert run(*options, tmp_path / "b.gguf")[0] == 0
    assert (tmp_path / "a.gguf").read_bytes() != (tmp_path / "b.gguf").read_bytes()


def test_options_without_an_effect_are_wrong_usage(model, tmp_path):
    for out, options in (
        ("out", ["--dtype", "q8_0"]),
        ("out.bin", ["--dtype", "q8_0"]),
        ("out.bin", ["--dtype", "float16"]),
        ("out.gguf", ["--calibration-text", model]),
        ("out.gguf", ["--calibration-text", model, "--dtype", "q8_0"]),
    ):
        code, _, err = run("convert", model, "--out", tmp_path / out, *options)
        assert code == 2
        assert any(part in err for part in ("would have no effect", "--dtype q8_0 needs --out NAME.gguf"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_an_existing_output_is_refused_first(model, tmp_path, monkeypatch):
    monkeypatch.setattr("mlxlm.convert.conversion.open_module_checkpoint", lambda *_: 1 / 0)
    code, out, err = run("convert", model, "--out", model)
    assert code == 1 and out == "" and f"{model} already exists (try: another name for the output)" in err


def test_choices_are_those_of_the_library():
    from mlxlm.cli.convert import _OUTTYPES
    from mlxlm.convert.conversion import DTYPES, OUTTYPES

    assert list(_OUTTYPES.values()) == list(OUTTYPES) and list(_OUTTYPES)[: len(DTYPES)] == list(DTYPES)


def test_empty_names_and_files_with_a_slash(model, tmp_path):
    for arguments in (["", "--out", tmp_path / "a"], [model, "--out", ""], [model, "--out", f"{tmp_path}/y.gguf/"]):
        assert run("convert", *arguments)[0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
