"""Conversions between all formats, checked by other programs, and what must not be left behind."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, save_weights
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.config import ModelConfig
from mlxlm.convert import convert
from mlxlm.convert.compare import tensor_diff
from mlxlm.convert.conversion import DTYPES, output_format
from mlxlm.quantize import quantize
from mlxlm.utils.errors import CheckpointError, ConfigError, TokenizerError
from tests.paths import SHARED
from tests.small_models import (
    arrays_of,
    change_config,
    random_decoder,
    sentencepiece_proto,
    sentencepiece_tokenizer,
    write_folder,
)  # fmt: skip

IDS = [5, 17, 280, 33, 2, 9, 120, 44]


@pytest.fixture
def write_model(tmp_path, tiny_tokenizer):
    """`write_model(name, dtype, **fields)`: a model folder with random weights, as Hugging Face has it."""

    def write(name="model", dtype="float16", tokenizer=True, **fields):
        sizes = {
            "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 128, "eos_token_id": 3,
        }  # fmt: skip
        config = ModelConfig(**{**sizes, **fields})
        weights = {n: w.astype(DTYPES[dtype]) for n, w in arrays_of(random_decoder(config)).items()}
        folder = write_folder(tmp_path / name, weights, config, torch_dtype=dtype, their_own_field=[1, 2])
        if tokenizer:
            tiny_tokenizer.save(folder)
        return folder

    return write


def results(report) -> dict[str, str]:
    return {check.name: check.result for check in report.checks}


def test_a_folder_of_transformers_opens_in_transformers_and_mlx_lm_again(tmp_path, tiny_tokenizer):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=320, max_position_embeddings=128,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    tiny_tokenizer.save(tmp_path / "theirs")
    (tmp_path / "theirs/generation_config.json").write_text('{"temperature": 0.5}')
    report = convert(tmp_path / "theirs", tmp_path / "out")
    assert results(report) == dict.fromkeys(("tensors", "tokenizer", "configuration", "logits"), "equal")
    assert report.dtype == "float32" and report.bits_per_weight == 32 and report.warnings == []
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(again(torch.tensor([IDS])).logits, theirs(torch.tensor([IDS])).logits)
    ours, _ = load_model(tmp_path / "out")
    np.testing.assert_allclose(ours(mx.array([IDS])), theirs(torch.tensor([IDS])).logits.detach(), atol=1e-4)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    mlx_lm = pytest.importorskip("mlx_lm")
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    np.testing.assert_allclose(model(mx.array([IDS])), ours(mx.array([IDS])), atol=1e-4)


def test_around_the_formats_and_back_bit_equal(write_model, tmp_path):
    source = write_model(dtype="bfloat16")
    reports = [
        convert(source, tmp_path / "out.gguf"),
        convert(tmp_path / "out.gguf", tmp_path / "back"),
        convert(tmp_path / "back", tmp_path / "last"),
    ]
    assert [report.format for report in reports] == ["gguf", "huggingface", "huggingface"]
    assert [report.dtype for report in reports] == ["BF16", "bfloat16", "bfloat16"]
    for report in reports:
        assert set(results(report).values()) == {"equal"}, report.checks
    assert tensor_diff(open_checkpoint(source), open_checkpoint(tmp_path / "last")).equal
    before, after = (dict(mx.load(str(folder / "model.safetensors"))) for folder in (source, tmp_path / "last"))
    assert before.keys() == after.keys()
    assert all(after[name].dtype == mx.bfloat16 and mx.array_equal(after[name], before[name]) for name in before)


def test_a_llama2c_file_and_back(write_model, tmp_path):
    tokenizer = sentencepiece_tokenizer(sentencepiece_proto())
    source = write_model(tokenizer=False, vocab_size=300, eos_token_id=2, bos_token_id=1)
    tokenizer.save(source)
    (tmp_path / "sub").mkdir()
    report = convert(source, tmp_path / "sub/out.bin")
    assert report.format == "llama2.c" and report.dtype == "float32" and set(results(report).values()) == {"equal"}
    assert sorted(p.name for p in (tmp_path / "sub").iterdir()) == ["out.bin", "tokenizer.bin"]
    back = convert(tmp_path / "sub/out.bin", tmp_path / "back")
    assert set(results(back).values()) == {"equal"} and back.dtype == "float32"
    assert tensor_diff(open_checkpoint(source), open_checkpoint(tmp_path / "back")).equal
    convert(source, tmp_path / "sub/again.bin", verify_output=False)  # beside the same tokenizer.bin
    (tmp_path / "sub/tokenizer.bin").write_bytes(b"another one")
    with pytest.raises(CheckpointError, match="tokenizer.bin already exists.*try: another output folder"):
        convert(source, tmp_path / "sub/third.bin", verify_output=False)
    assert sorted(p.name for p in (tmp_path / "sub").iterdir()) == ["again.bin", "out.bin", "tokenizer.bin"]
    text = "the cat, a naive bird\n  fell"
    assert open_checkpoint(tmp_path / "back").load_tokenizer().encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize(("outtype", "bits"), [("Q8_0", 8.5), ("Q4_0", 4.5), ("Q6_K", 6.5625), ("Q4_K_M", 5)])
def test_quantized_gguf_is_within_its_rounding(write_model, tmp_path, outtype, bits):
    source = write_model(hidden_size=256, intermediate_size=256)
    report = convert(source, tmp_path / "out.gguf", outtype=outtype)
    assert results(report)["tensors"] == results(report)["logits"] == "within rounding"
    assert report.bits_per_weight < bits + 2 and report.dtype == outtype
    back = convert(tmp_path / "out.gguf", tmp_path / "back", dtype="float16")
    assert back.dtype == "float16" and back.bits_per_weight == 16 and back.notes == []
    assert "quantization" not in json.loads((tmp_path / "back/config.json").read_text())


def test_a_quantized_folder_becomes_plain(write_model, tmp_path):
    source = write_model()
    weights = remove_weights(source)
    name = "model.layers.1.mlp.up_proj"
    packed = dict(zip(("weight", "scales", "biases"), mx.quantize(weights.pop(f"{name}.weight"), 32, 4), strict=True))
    save_weights(source, weights | {f"{name}.{part}": value for part, value in packed.items()})
    plan = {"group_size": 32, "bits": 4, "mode": "affine"}
    change_config(source, quantization=plan, quantization_config=plan)
    report = convert(source, tmp_path / "out", dtype="float16")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization" not in written and "quantization_config" not in written
    assert written["their_own_field"] == [1, 2] and report.dtype == "float16"
    assert open_checkpoint(tmp_path / "out").tensors[f"{name}.weight"].dtype == mx.float16


def test_a_published_llama2c_file_comes_back(tmp_path):
    source = SHARED / "models/stories260K/stories260K.bin"
    if not source.is_file():
        pytest.skip("no models beside this checkout")
    convert(source, tmp_path / "folder")
    convert(tmp_path / "folder", tmp_path / "out/model.bin")
    written, expected = (np.fromfile(path, np.float32) for path in (tmp_path / "out/model.bin", source))
    np.testing.assert_allclose(written, expected, atol=1e-5)  # the rotary table is rounded differently
    assert (written == expected).mean() > 0.99
    assert (tmp_path / "out/tokenizer.bin").read_bytes() == source.with_name("tok512.bin").read_bytes()


def test_dtypes(write_model, tmp_path):
    source = write_model(dtype="float32")
    report = convert(source, tmp_path / "half", dtype="float16")
    assert results(report)["tensors"] == "within rounding" and report.bits_per_weight == 16
    assert json.loads((tmp_path / "half/config.json").read_text())["torch_dtype"] == "float16"
    wide = convert(tmp_path / "half", tmp_path / "wide", dtype="float32")
    assert results(wide)["tensors"] == results(wide)["logits"] == "equal" and wide.bits_per_weight == 32


def remove_weights(folder) -> dict[str, mx.array]:
    """The weights of a folder, which has none then."""
    weights = mx.load(str(folder / "model.safetensors"))
    mx.eval(weights)
    (folder / "model.safetensors").unlink()
    return weights


def change(folder, name: str, value) -> None:
    weights = remove_weights(folder)
    weights[name] = mx.where(mx.arange(weights[name].size).reshape(weights[name].shape) == 7, value, weights[name])
    save_weights(folder, weights)


NAME = "model.layers.1.self_attn.v_proj.weight"


@pytest.mark.parametrize("out", ["out", "out.gguf", "out.bin"])
def test_values_that_are_not_numbers_are_refused(write_model, tmp_path, out):
    source = write_model(dtype="float32", tokenizer=False, vocab_size=300, eos_token_id=2, bos_token_id=1)
    sentencepiece_tokenizer(sentencepiece_proto()).save(source)
    change(source, NAME, float("nan"))
    with pytest.raises(CheckpointError, match=r"layers.1|blk.1|v_proj|w_?v") as caught:
        convert(source, tmp_path / out, verify_output=False)
    assert ".partial" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(("out", "options"), [("out", {"dtype": "float16"}), ("out.gguf", {"outtype": "F16"})])
def test_values_that_float16_can_not_hold_are_refused(write_model, tmp_path, out, options):
    source = write_model(dtype="float32")
    change(source, NAME, 70000.0)
    with pytest.raises(CheckpointError, match=r"(v_proj.weight.*up to 7e\+04|attn_v.weight).*try: (bfloat16|BF16)"):
        convert(source, tmp_path / out, **options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_options_outputs_and_sources_that_make_no_sense(write_model, tmp_path):
    source = write_model()
    with pytest.raises(CheckpointError, match="already exists"):
        convert(source, source)
    (tmp_path / "there.gguf").touch()
    with pytest.raises(CheckpointError, match="already exists"):
        convert(source, tmp_path / "there.gguf")
    for out, options in (
        ("a", {"outtype": "F16"}), ("a.gguf", {"dtype": "float16"}), ("a.bin", {"dtype": "float32"}),
        ("a", {"dtype": "int8"}), ("a.gguf", {"outtype": "Q5_K"}),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            convert(source, tmp_path / out, **options)
    change_config(source, model_type="gpt_neo")
    with pytest.raises(CheckpointError, match="neither mlxlm nor mlx_lm has a model for model_type 'gpt_neo'"):
        convert(source, tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "there.gguf"]


def test_a_model_without_a_tokenizer(write_model, tmp_path):
    source = write_model(tokenizer=False)
    report = convert(source, tmp_path / "out")
    assert "no tokenizer" in report.warnings[0] and results(report)["logits"] == "equal"
    with pytest.raises(TokenizerError, match="no tokenizer"):
        convert(source, tmp_path / "out.gguf")


@pytest.mark.parametrize("command", [convert, quantize])
def test_a_tokenizer_that_can_not_be_read_is_an_error_at_the_beginning(write_model, tmp_path, command):
    source = write_model()
    (source / "tokenizer.json").write_text('{"model": 1}')
    message = "can't be read: .*tokenizer.json.*remove the tokenizer's files to write the weights only"
    with pytest.raises(TokenizerError, match=message):
        command(source, tmp_path / "out", progress=lambda phase, *_: pytest.fail(phase))
    assert not (tmp_path / "out").exists()


def test_progress_ends_where_it_should(write_model, tmp_path):
    source, calls = write_model(), {}
    convert(source, tmp_path / "out", progress=lambda phase, done, total: calls.update({phase: (done, total)}))
    assert all(done == total for done, total in calls.values()), calls
    nbytes = sum(tensor.nbytes for tensor in open_checkpoint(source).tensors.values())
    assert calls["writing"] == (nbytes, nbytes) and "comparing logits" in calls


_PEAK = """
import sys
from mlxlm.backend.mlx import mx
from mlxlm.convert import convert

mx.set_cache_limit(0)
convert(sys.argv[1], sys.argv[2], dtype="float16", verify_output=False)
print(mx.get_peak_memory())
"""


def test_memory_is_that_of_the_largest_tensor(write_model, tmp_path):
    source = write_model(dtype="float32", num_hidden_layers=8, intermediate_size=2048, hidden_size=256)
    size = sum(tensor.nbytes for tensor in open_checkpoint(source).tensors.values())
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < size / 4


@pytest.mark.parametrize("out", ["z.safetensors", "z.PTH", "z.onnx", ".gguf", ".bin", "-"])
def test_names_of_files_that_this_does_not_write_are_refused(write_model, tmp_path, out):
    with pytest.raises(ConfigError, match="convert (doesn't|can't) write .* for a folder, NAME.gguf or NAME.bin"):
        convert(write_model(), tmp_path / out)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert output_format(Path("my-model-v1.5")).name == "huggingface"


def test_what_points_to_code_does_not_come_along(write_model, tmp_path):
    source = write_model()
    code = {"auto_map": {"AutoModel": "evil.Model"}, "model_file": "evil.py", "custom_pipelines": {"x": "evil.py"}}
    change_config(source, **code)
    convert(source, tmp_path / "out", verify_output=False)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert not code.keys() & written.keys() and written["their_own_field"] == [1, 2]


def test_other_types_than_requested_are_notes(write_model, tmp_path):
    source = write_model(dtype="bfloat16", tie_word_embeddings=True, intermediate_size=80)
    weights = remove_weights(source)
    save_weights(source, {n: w.astype(mx.float32) if "norm" in n else w for n, w in weights.items()})
    assert convert(source, tmp_path / "out", verify_output=False).dtype == "bfloat16, float32"
    report = convert(source, tmp_path / "out.gguf", outtype="Q4_0", verify_output=False)
    assert report.warnings == [] and report.notes == [
        "kept in F16: blk.*.ffn_down.weight (its rows are not a multiple of 32)",
        "kept in Q8_0: token_embd.weight (its errors are errors of the logits)",
    ]
    report = convert(source, tmp_path / "k.gguf", outtype="Q6_K", verify_output=False)
    assert report.notes[0].startswith("kept in Q8_0: ") and report.notes[0].endswith("rows are not a multiple of 256)")
