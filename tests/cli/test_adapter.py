"""`--adapter` of every command that has it: the same as with a model that the adapter was merged into."""

import json

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import open_checkpoint
from mlxlm.server.models import ModelSettings, load_model
from tests.cli.helpers import error_line
from tests.run_command import run
from tests.small_models import write_peft

NAME = "model.layers.1.mlp.down_proj"


@pytest.fixture
def adapter(tmp_path):
    mx.random.seed(5)
    shapes = {f"{NAME}.lora_A.weight": (2, 96), f"{NAME}.lora_B.weight": (64, 2)}
    return write_peft(tmp_path / "adapter", {name: 2 * mx.random.normal(shape) for name, shape in shapes.items()})


@pytest.fixture
def merged(model, adapter, tmp_path):
    """A folder that `mlxlm convert --adapter` wrote."""
    out = tmp_path / "merged"
    assert run("convert", model, "--adapter", adapter, "--out", out)[0] == 0
    return out


def test_convert(model, merged):
    before, after = (open_checkpoint(folder).tensors for folder in (model, merged))
    different = [name for name in before if not mx.array_equal(before[name].read(), after[name].read()).item()]
    assert different == [f"{NAME}.weight"] and after[f"{NAME}.weight"].dtype == mx.float16


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "-p", "the cat", "-n", "12", "--temp", "0"],
        ["generate", "-p", "the cat", "-n", "6", "--temp", "0", "--num-samples", "2"],
        ["chat", "-p", "the cat", "-n", "12", "--temp", "0", "--chat-template", "plain"],
        ["evaluate", "TEXT", "--json"],
        ["evaluate", "--multiple-choice", "QUESTIONS", "--json"],
    ],
)
def test_a_model_with_its_adapter_is_the_merged_model(arguments, model, adapter, merged, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on a mat and saw two birds\n" * 3)
    question = {"question": "the cat", "choices": [" sat on", " saw", " birds"], "answer": 1}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question))
    paths = {"TEXT": tmp_path / "text.txt", "QUESTIONS": tmp_path / "questions.jsonl"}
    command, *options = [paths.get(argument, argument) for argument in arguments]
    plain, wanted, found = (
        run(command, *target, *options) for target in ([model], [merged], [model, "--adapter", adapter])
    )
    assert found[0] == 0 and found[1].replace(str(model), "") == wanted[1].replace(str(merged), "")
    assert plain[1] != found[1]


def test_jsonl(model, adapter, merged, tmp_path):
    (tmp_path / "requests.jsonl").write_text('{"id": "a", "prompt": "the cat", "max_tokens": 8}\n')
    options = ["--jsonl", tmp_path / "requests.jsonl"]
    results = [run("generate", *target, *options) for target in ([merged], [model, "--adapter", adapter])]
    assert len({json.loads(out)["text"] for _, out, _ in results}) == 1


def test_quantize(model, adapter, merged, tmp_path):
    options = ["--method", "rtn", "--no-evaluate", "--json"]
    assert run("quantize", merged, "--out", tmp_path / "a", *options)[0] == 0
    assert run("quantize", model, "--adapter", adapter, "--out", tmp_path / "b", *options)[0] == 0
    a, b = (open_checkpoint(tmp_path / name).tensors for name in "ab")
    assert all(mx.array_equal(a[name].read(), b[name].read()).item() for name in a) and list(a) == list(b)


def test_a_served_model(model, adapter, merged):
    settings = ModelSettings(max_memory=1 << 30, adapter=adapter)
    served = load_model("m", str(model), settings)
    expected = open_checkpoint(merged).tensors[f"{NAME}.weight"].read().astype(mx.float32)
    assert mx.array_equal(served.lm.model.layers[1].mlp.down_proj.weight.astype(mx.float32), expected).item()
    served.engine.close()


def test_errors(model, adapter, tmp_path):
    assert "there is no adapter" in error_line("generate", model, "--adapter", tmp_path / "no", "-p", "x")
    (adapter / "adapter_config.json").write_text('{"peft_type": "LOHA"}')
    assert "peft_type 'LOHA' is not" in error_line("generate", model, "--adapter", adapter, "-p", "x")
    code, _, err = run("serve", model, tmp_path, "--adapter", adapter)
    assert code == 2 and "--adapter needs a single MODEL" in err
    code, _, err = run("generate", model, "--adapter-path", adapter, "-p", "x")
    assert code == 2 and "--adapter" in err
