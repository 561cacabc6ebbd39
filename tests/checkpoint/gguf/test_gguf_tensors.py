"""Types of tensors: against the gguf package, and what becomes of weights that a kind of file can't hold."""

from __future__ import annotations

import gguf as oracle
import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.gguf.ggml_types import GGML_TYPES
from mlxlm.checkpoint.gguf.reader import read_header
from mlxlm.checkpoint.gguf.tensors import _CHUNK, read_tensor
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.gguf.gguf_models import random_model, tensors_of


def test_types_are_ggmls():
    for number, kind in GGML_TYPES.items():
        known = oracle.GGMLQuantizationType(number)
        assert (known.name, oracle.GGML_QUANT_SIZES[known]) == (kind.name, (kind.block, kind.bytes))


@pytest.mark.parametrize("number", GGML_TYPES, ids=lambda number: GGML_TYPES[number].name)
def test_every_type_is_read_as_the_gguf_package_does(number, tmp_path):
    kind, rng = GGML_TYPES[number], np.random.default_rng(number)
    rows = 3 if number % 2 else _CHUNK // 512 + 3  # some in more than one part
    if kind.block == 1:
        values = rng.normal(size=(rows, 512)).astype(np.float32)
        stored = oracle.quants.quantize(values, oracle.GGMLQuantizationType(number))
    else:
        stored = rng.integers(0, 256, (rows, 512 // kind.block * kind.bytes), dtype=np.uint8)
    writer = oracle.GGUFWriter(tmp_path / "m.gguf", "test")
    writer.add_tensor("x", stored, raw_dtype=oracle.GGMLQuantizationType(number))
    write_all(writer)
    tensor = read_tensor(read_header(tmp_path / "m.gguf").tensors["x"])
    value = tensor.read()
    assert (tensor.shape, tensor.stored_dtype, tensor.nbytes) == ((rows, 512), kind.name, stored.nbytes)
    assert (tuple(value.shape), value.dtype) == (tensor.shape, tensor.dtype)
    with np.errstate(all="ignore"):
        expected = oracle.quants.dequantize(stored, oracle.GGMLQuantizationType(number))
    np.testing.assert_array_equal(np.array(value.astype(mx.float32)), expected)


def write_all(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", gguf.OUTTYPES)
def test_each_kind_is_what_the_gguf_package_makes(kind, tiny_tokenizer, tmp_path):
    model = random_model("gpt2", tiny_tokenizer)
    written = gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, kind)
    reader = oracle.GGUFReader(tmp_path / "m.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    assert found["output_norm.weight"].tensor_type.name == found["position_embd.weight"].tensor_type.name == "F32"
    matrix = found["blk.1.ffn_up.weight"]
    assert matrix.tensor_type.name == kind
    expected = oracle.quants.quantize(np.array(model.layers[1].mlp.up_proj.weight), matrix.tensor_type)
    np.testing.assert_array_equal(np.asarray(matrix.data).view(np.uint8), expected.view(np.uint8))
    head = "Q8_0" if kind == "Q4_0" else kind
    assert found["token_embd.weight"].tensor_type.name == head  # the head too: they are tied
    assert written.others == ({"token_embd.weight": "Q8_0"} if kind == "Q4_0" else {})
    file_type = oracle.LlamaFileType(reader.get_field("general.file_type").contents()).name
    assert file_type in (f"ALL_{kind}", f"MOSTLY_{kind}")


def test_rows_that_no_block_divides_stay_in_float16_and_are_listed(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    config = model.config.with_changes(intermediate_size=72)
    tensors = tensors_of(model)
    for i in range(config.num_hidden_layers):
        mlp = f"model.layers.{i}.mlp"
        tensors |= {f"{mlp}.{name}_proj.weight": lazy_tensor(mx.ones((72, 64))) for name in ("gate", "up")}
        tensors[f"{mlp}.down_proj.weight"] = lazy_tensor(mx.ones((64, 72)))
    written = gguf.write(tmp_path / "m.gguf", config, tensors, tiny_tokenizer, "Q8_0")
    assert written.others == {f"blk.{i}.ffn_down.weight": "F16" for i in range(config.num_hidden_layers)}


@pytest.mark.parametrize("kind", gguf.OUTTYPES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_refused(kind, dtype, bad, tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    model.layers[2].mlp.up_proj.weight[5, 7] = bad
    with pytest.raises(CheckpointError, match=r"blk\.2\.ffn_up\.weight has values that are NaN"):
        gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model, dtype), tiny_tokenizer, kind)
    assert not list(tmp_path.iterdir())


def test_weights_too_large_for_float16_are_refused(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    model.layers[0].mlp.up_proj.weight[0, 0] = -1e5
    with pytest.raises(CheckpointError, match="too large for F16"):
        gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "F16")


def test_quantized_weights_are_refused(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    tensors = {**tensors_of(model), "model.layers.0.mlp.up_proj.scales": lazy_tensor(mx.ones((64, 1)))}
    with pytest.raises(CheckpointError, match="quantized"):
        gguf.write(tmp_path / "m.gguf", model.config, tensors, tiny_tokenizer, "F16")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_llama_cpp_runs_quantized_files(kind, tiny_tokenizer, tmp_path, open_llama_cpp):
    model = random_model("qwen2", tiny_tokenizer)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, kind)
    again = open_checkpoint(tmp_path / "m.gguf")
    model.load_weights([(name, tensor.read().astype(mx.float32)) for name, tensor in again.tensors.items()])
    tokens = np.random.default_rng(0).integers(0, 300, 24).tolist()
    theirs = open_llama_cpp(tmp_path / "m.gguf", logits_all=True)
    theirs.eval(tokens)
    expected, logits = np.array(theirs.scores[:24]), np.array(model(mx.array([tokens]))[0])
    # llama.cpp multiplies with activations in 8 bits: errors of 1% in each product, through three layers.
    assert np.abs(logits - expected).mean() < 0.05 * logits.std()
