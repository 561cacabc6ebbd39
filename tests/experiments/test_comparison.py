"""Architecture comparison, and `mlxlm compare-architectures`."""

import json

import matplotlib.image
import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model
from mlxlm.cli.main import _run
from mlxlm.data import DataOptions, TokenDataset, prepare
from mlxlm.experiments.run_group import is_finished
from mlxlm.experiments.sweep import Comparison
from mlxlm.experiments.variant import Variant
from mlxlm.tokenizer import load
from mlxlm.train import Budget, Finished, Stopped, TokenizerOptions, start_run
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from tests.train.training_runs import contents, finish, read_log

SETTINGS = {"steps": 6, "batch_size": 4, "max_seq_length": 16, "eval_every": 3, "save_every": 2}
VARIANTS = [Variant.parse(text) for text in ("rope", "post: norm_placement=post, positions=sinusoidal, dropout=0.1")]
TINY = [
    "--preset", "0.3m", "--vocab-size", "300", "--steps", "4", "--batch-size", "2", "--max-seq-length", "16",
    "--eval-tokens", "200",
]  # fmt: skip


@pytest.fixture
def start(tmp_path, text_file, tiny_config, tokenizer_folder):
    def make(name="out", variants=VARIANTS, **changes):
        arguments = {"tokenizer": tokenizer_folder, "settings": SETTINGS, **changes}
        return Comparison.start(tmp_path / name, [text_file], tiny_config, variants, **arguments)

    return make


def test_special_tokens_are_those_of_the_tokenizer(tmp_path, text_file, tiny_config, tokenizer_folder):
    config = tiny_config.with_changes(vocab_size=9000, bos_token_id=8000, eos_token_id=[8001, 8002], pad_token_id=8003)
    settings = {"tokenizer": tokenizer_folder, "settings": SETTINGS}
    comparison = Comparison.start(tmp_path / "out", [text_file], config, VARIANTS, **settings)
    run = start_run(
        tmp_path / "run", [text_file], config, tokenizer=TokenizerOptions(vocab_size=300), settings=SETTINGS
    )
    tokenizer = load(tokenizer_folder)
    assert comparison.open_run(next(comparison.trials())).config.eos_token_id == tokenizer.eos_token_id
    assert run.config.vocab_size <= 300 and run.config.eos_token_id == load(run.path).eos_token_id


def train_all(comparison):
    for trial in comparison.trials():
        run = comparison.open_run(trial)
        if not is_finished(run):
            assert isinstance(finish(run, resume=True)[-1], Finished)
    return comparison


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (["base"], "two variants are needed"),
        (["base", "base"], "two variants are called base"),
        (["base", "data: norm=layer"], "a variant can't be called data"),
        (["base", "Base: norm=layer"], "two variants are called base"),  # of macOS
        (["\uac00: norm=layer", "\u1100\u1161: norm=rms"], "two variants are called"),  # composed, and not
        (["base", "comparison.png: norm=layer"], "a variant can't be called comparison.png"),
        (["base", "Data: norm=layer"], "a variant can't be called Data"),
        (["base", f"{'x' * 101}: norm=layer"], "can't be the name of a variant, .* .try: at most 100"),
        (["base", "a\x1bb: norm=layer"], r"'a.x1bb' can't be the name"),
        (["base", "x: dtype=float17"], "variant x: .*float17"),
        (
            ["base", "x: warmup_steps=10000"],
            "variant x: .* warmup_steps is 10000, it must be less than steps, which is 6",
        ),
        (["base", "x: optimizer=adafactor, beta2=0.9"], "variant x: .* adafactor has no beta2"),
        (["base", "x: hidden_size=65536, num_hidden_layers=99"], "variant x: training takes about"),
        (["base", "x: window=16"], "variant x: sliding_window 16 has no effect on 16 tokens"),
        (["base", "x: foo=1"], "variant x: unknown override 'foo'"),
        (["base", "x: vocab_size=5"], "variant x: vocab_size can't differ .* .try: one tokenizer"),
    ],
)
def test_impossible_variants_are_rejected(start, tmp_path, variants, message):
    with pytest.raises(ConfigError, match=message):
        start(variants=[Variant.parse(text) for text in variants])
    assert not (tmp_path / "out").exists()


def check_same_tokens(comparison):
    rope, post = (comparison.open_run(trial) for trial in comparison.trials())
    assert rope.data == post.data == comparison.data and rope.data_digest == post.data_digest
    differences = {"dropout": 0.1, "learning_rate": pytest.approx(rope.settings.learning_rate / 3, rel=0.01)}
    assert post.settings.to_dict() == {**rope.settings.to_dict(), **differences}
    assert (rope.config.model_type, post.config.model_type) == ("llama", "mlxlm")
    assert post.config.norm_placement == "post" and post.config.positions == "sinusoidal"
    first, second = comparison.results()
    assert first.tokens == second.tokens == 6 * 4 * 16 and first.finished and second.finished
    assert first.parameters - second.parameters == rope.config.hidden_size  # the last norm
    logged = [e["bits_per_byte"] for e in read_log(rope) if e["event"] == "validation"]
    assert len(logged) == 2 and first.bits_per_byte == min(logged)
    assert first.memory > 4 * first.parameters and first.tokens_per_second > 0
    model, config = load_model(post.path)
    assert config == post.config and np.isfinite(np.array(model(mx.array([[1, 2, 3]])))).all()


def test_train_stop_and_continue(start):
    whole, parts = train_all(start("whole")), start("parts")
    check_same_tokens(whole)
    assert finish(parts.open_run(next(parts.trials())), stop_at=3)[-1] == Stopped(3, parts.path / "rope")
    (stopped,) = parts.results()
    assert (stopped.step, stopped.finished, stopped.memory) == (3, False, None)
    assert (again := Comparison.open(parts.path)) == parts
    train_all(again)
    for name in ("rope", "post"):
        last = "checkpoints/step-6"
        assert contents(whole.path / name / last) == contents(parts.path / name / last)
    with pytest.raises(CheckpointError, match="already exists"):
        start("parts")
    values = json.loads((parts.path / "comparison.json").read_text())
    variant = values["variants"][1]
    hostile = [{"name": 1}, {"parts": None}, {"parts": {"norm": 3}}, {"settings": {"lr": 1}}, {"more": 1}]
    for damaged in (
        {},
        *({**values, "variants": [variant | change]} for change in hostile),
    ):
        (parts.path / "comparison.json").write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match=r"comparison.json is damaged"):
            Comparison.open(parts.path)
    with pytest.raises(ConfigError, match=r"is not a comparison"):
        Comparison.open(parts.path / "rope")


def test_budgets(start, tmp_path, text_file, tokenizer_folder):
    settings = {name: value for name, value in SETTINGS.items() if name != "steps"}
    other = [Variant.parse("base"), Variant.parse("x: optimizer=adafactor")]  # which has no beta2 to share
    tokens = start("tokens", [*other, Variant.parse("batch_size=8")], budget=Budget(tokens=1000), settings=settings)
    assert [tokens.steps(variant, 0) for variant in tokens.variants] == [16, 16, 8]  # of 64, 64 and 128 tokens
    timed = start("minutes", budget=Budget(minutes=0.3), settings={"max_seq_length": 16})
    assert timed.steps(timed.variants[0], 0) >= 20 and "batch_size" in timed.settings
    with pytest.raises(ConfigError, match=r"would see \d+ tokens, too few .try: `minutes=\d+`, or fewer variants"):
        start("short", budget=Budget(minutes=0.05), settings={**settings, "batch_size": 4096})
    warm = start("warm", budget=Budget(tokens=1000), settings={**settings, "warmup_steps": 3})
    assert warm.open_run(next(warm.trials())).settings.warmup_steps == 3
    with pytest.raises(ConfigError, match="tokens and steps each say how long"):
        start("both", budget=Budget(tokens=1000))
    prepare(DataOptions([text_file]), load(tokenizer_folder), tmp_path / "prepared")
    prepared = Comparison.start(
        tmp_path / "own", [tmp_path / "prepared"], start("other").config, VARIANTS, settings=SETTINGS
    )
    assert prepared.data == tmp_path / "prepared" and not (tmp_path / "own/data").exists()
    assert len(TokenDataset.open(prepared.open_run(next(prepared.trials())).data, "train")) > 0
    with pytest.raises(DataError, match="stdin can be read only once"):
        Comparison.start(tmp_path / "stdin", ["-"], prepared.config, VARIANTS, settings=SETTINGS)


def test_command(tmp_path, text_file, capsys):
    out = str(tmp_path / "out")
    command = ["compare-architectures", str(text_file), "--out", out, *TINY, "--eval-every", "2"]
    variants = ["--variant", "rope", "--variant", "a$_{b$: hidden_size=48, intermediate_size=40, positions=alibi"]
    assert _run([*command, *variants]) == 0
    table, stderr = capsys.readouterr()
    lines = table.splitlines()
    assert lines[0].split()[:3] == ["variant", "round", "parameters"] and lines[-1] == f"{out}/sweep.html"
    assert {line.split()[0] for line in lines[1:-1]} == {"rope", "a$_{b$"}
    assert "no two variants have several seeds" in stderr
    assert "a$_{b$: only mlxlm opens this model: the nearest family, llama, has no positions 'alibi'" in stderr
    picture = matplotlib.image.imread(f"{out}/comparison.png")
    colours = set(map(tuple, np.round(255 * picture.reshape(-1, 4)[:, :3]).astype(int).tolist()))
    assert {(31, 119, 180), (255, 127, 14)} <= colours  # both curves
    assert _run(["compare-architectures", "--resume", out, "--json"]) == 0
    stdout, stderr = capsys.readouterr()
    values = json.loads(stdout)
    assert stderr.count("already finished") == 2
    assert [v["name"] for v in values["runs"]] == ["rope", "a$_{b$"] and len(values["notes"]) == 2
    assert all(v["finished"] and v["tokens"] == 128 for v in values["runs"])
    for options, problem in (
        (["--resume", out, "--steps", "5"], "own data and settings: --steps can't be given"),
        ([], "or --resume FOLDER"),
    ):
        assert _run(["compare-architectures", *options]) == 2
        assert problem in capsys.readouterr().err


def test_failing_variant_does_not_stop_the_others(tmp_path, text_file, capsys):
    command = ["compare-architectures", str(text_file), "--out", str(tmp_path / "out"), *TINY]
    variants = ["--variant", "wild: learning_rate=1e9, grad_clip=0, warmup_steps=0", "--variant", "base", "--json"]
    assert _run([*command, *variants]) == 1
    values = json.loads(capsys.readouterr().out)
    wild, base = values["runs"]
    assert not wild["finished"] and base["finished"] and values["notes"][0].startswith("wild: stopped at step ")


def test_pretrain_with_overrides(tmp_path, text_file, capsys):
    run = str(tmp_path / "run")
    command = ["pretrain", str(text_file), "--out", run, *TINY]
    assert _run([*command, "--set", "positions=sinusoidal", "--set", "norm_placement=post"]) == 0
    nearest = "only mlxlm opens this model: the nearest family, granite, has no norm_placement 'post', no positions"
    assert nearest in capsys.readouterr().err
    assert _run(["inspect", run]) == 0
    stdout, stderr = capsys.readouterr()
    assert "on the stream after each sublayer" in stdout and "positions      sinusoidal" in stdout and nearest in stderr
    assert _run(["generate", run, "--prompt", "The", "--max-tokens", "4"]) == 0
    assert _run([*command, "--set", "learning_rate=1"]) == 1
    assert "learning_rate can't be overridden (try: --learning-rate)" in capsys.readouterr().err


def test_parse():
    assert Variant.parse("base") == Variant("base", {}, {})
    assert Variant.parse("alibi") == Variant("alibi", {"positions": "alibi"}, {})
    assert Variant.parse("rope_scaling=yarn:4").parts == {"rope_scaling": "yarn:4"}
    read = Variant.parse("my way: hidden_size=64, dropout=0.1,learning_rate=1e-3")
    assert read == Variant("my way", {"hidden_size": "64"}, {"dropout": 0.1, "learning_rate": 1e-3})
    assert read.folder == "my-way"
    scaling = '{"rope_type": "linear", "factor": 2}'
    assert Variant.parse(f"x: rope_scaling={scaling}, norm=layer").parts == {"rope_scaling": scaling, "norm": "layer"}
    nested = '{"rope_type": "linear", "a": {"b": [1, 2], "c": 1}, "factor": 2}'
    assert Variant.parse(f"x: rope_scaling={nested}, seed=1") == Variant("x", {"rope_scaling": nested}, {"seed": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wide", "variant 'wide' changes nothing .try: \"wide: NAME=VALUE\", or base"),
        ("wide:", "'wide:' is not a variant"),
        ("x: dropout=many", "variant x: dropout is 'many' .try: a number"),
        ("x: steps=4", "variant x: steps can't differ between variants .try: one budget"),
        ("x: norm=layer,", "variant x: '' sets nothing"),
        ("x: seed=1, seed=2", "variant x: seed is set to both 1 and 2"),
    ],
)
def test_parse_rejects_other_text(text, message):
    with pytest.raises(ConfigError, match=message):
        Variant.parse(text)
