"""Embeddings: pooling, batches of several lengths, dimensions and prompts, as transformers computes them."""

import json
from dataclasses import replace

import numpy as np
import pytest

import mlxlm
from mlxlm import tokenizer
from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint.embedding_config import EmbeddingConfig
from mlxlm.families import config_to_hf
from mlxlm.generation import LoadedModel
from mlxlm.generation import embedding as embedding_module
from mlxlm.generation.embedding import embed, hidden_states
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError, ConfigError, GenerationError

TRAINING = "The quick brown fox jumps over the lazy dog. Grüße, 世界! How are you today?\n"
TEXTS = ["The quick brown fox jumps over the lazy dog.", "How?", "Grüße, 世界! How are you today?", "fox " * 60]


@pytest.fixture
def lm(tiny_config, tmp_path):
    model = Decoder(tiny_config.with_changes(max_position_embeddings=1000))
    model.init_weights(seed=3)
    model.eval()
    mx.eval(model.parameters())
    return LoadedModel(model, tokenizer.train([TRAINING * 4], 300), model.config, tmp_path)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_text_among_others_has_the_embedding_of_its_own_hidden_states(lm, pooling):
    lm = replace(lm, embedding=EmbeddingConfig(pooling))
    states = [np.array(lm.model.model(mx.array([lm.tokenizer.encode(text)]))[0]) for text in TEXTS]
    expected = unit(np.stack([rows[-1] if pooling == "last" else rows.mean(axis=0) for rows in states]))
    np.testing.assert_allclose(embed(lm, TEXTS), expected, atol=1e-5)
    np.testing.assert_array_equal(embed(lm, (text for text in TEXTS)), embed(lm, TEXTS))
    np.testing.assert_allclose(embed(lm, TEXTS[0]), expected[0], atol=1e-5)
    np.testing.assert_allclose(embed(lm, [lm.tokenizer.encode(TEXTS[1])])[0], expected[1], atol=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("length", [1, 30, 700])
def test_a_long_text_is_read_in_chunks(lm, pooling, length, monkeypatch):
    lm = replace(lm, embedding=EmbeddingConfig(pooling))
    ids = [10 + n % 200 for n in range(length)]
    states = np.array(lm.model.model(mx.array([ids]))[0])
    monkeypatch.setattr(embedding_module, "PREFILL_STEP_SIZE", 64)
    expected = states[-1] if pooling == "last" else states.mean(axis=0)
    np.testing.assert_allclose(embed(lm, [ids])[0], unit(expected), atol=1e-5)


def test_many_texts_are_embedded_in_batches_with_little_padding(lm, monkeypatch):
    monkeypatch.setattr(embedding_module, "_BATCH_TOKENS", 64)
    sizes = []
    monkeypatch.setattr(
        embedding_module, "embed_batch", lambda lm, ids, dimensions: sizes.append([len(x) for x in ids]) or ids
    )
    encoded = [[5] * length for length in (3, 20, 1, 21, 2, 200, 20)]
    assert [vector.tolist() for vector in embed_rows(lm, encoded)] == encoded
    assert sizes == [[1, 2, 3], [20, 20, 21], [200]]


def embed_rows(lm, encoded):
    rows = {}
    for numbers, batch in embedding_module.similar_lengths(lm, encoded):
        rows |= dict(zip(numbers, embedding_module.embed_batch(lm, batch, None), strict=True))
    return [np.array(rows[number]) for number in range(len(encoded))]


def test_dimensions_are_the_first_ones_scaled_to_length_1(lm):
    whole, part = embed(lm, TEXTS), embed(lm, TEXTS, dimensions=8)
    assert whole.dtype == part.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(part, unit(whole[:, :8]), atol=1e-6)


def test_a_prompt_of_the_model_comes_before_the_text(lm):
    lm = replace(lm, embedding=EmbeddingConfig("mean", {"query": "Q: ", "document": ""}))
    np.testing.assert_array_equal(embed(lm, "cat", prompt_name="query"), embed(lm, "Q: cat"))
    np.testing.assert_array_equal(embed(lm, "cat", prompt_name="document"), embed(lm, "cat"))
    by_default = replace(lm, embedding=replace(lm.embedding, default_prompt="query"))
    np.testing.assert_array_equal(embed(by_default, "cat"), embed(lm, "Q: cat"))


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([""], {}, "text 1: the text is empty"),
        (["a", []], {}, "text 2: the text has 0 tokens"),
        ([[5] * 5000], {}, "has 5000 tokens, and the model embeds 1 to 1000"),
        ([[300]], {}, "ids from 0 to 299"),
        ([[-1]], {}, "ids from 0 to 299"),
        (["a"], {"dimensions": 0}, "dimensions is 0"),
        (["a"], {"dimensions": 33}, r"dimensions is 33, and the embeddings of this model have 32 \(try: 1 to 32"),
        (["a"], {"prompt_name": "query"}, "no prompt 'query'"),
        (3, {}, "texts is not a list"),
    ],
)
def test_what_cannot_be_embedded(lm, texts, options, message):
    with pytest.raises(GenerationError, match=message):
        embed(lm, texts, **options)
    assert embed(lm, []).shape[0] == 0


def save(lm, folder, prefix, **config):
    folder.mkdir()
    values = {**config_to_hf(lm.config), **config}
    (folder / "config.json").write_text(json.dumps(values))
    weights = {name.removeprefix(prefix): value for name, value in tree_flatten(lm.model.parameters())}
    weights.pop("lm_head.weight", None)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    lm.tokenizer.save(folder)
    return folder


def add_modules(folder, pooling, *kinds, **prompts):
    types = ["Transformer", "Pooling", *kinds]
    modules = [
        {"path": f"{n}_{kind}" * (n > 0), "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


OLD = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}


@pytest.mark.parametrize("pooling", [OLD, {"pooling_mode": "lasttoken", "include_prompt": True}])
def test_an_embedding_model_without_a_head_and_prefix_loads(lm, tmp_path, pooling):
    folder = save(lm, tmp_path / "e", "model.", tie_word_embeddings=False, architectures=["LlamaModel"])
    add_modules(folder, pooling, "Normalize", prompts={"query": "Query: "}, default_prompt_name=None)
    loaded = mlxlm.load(folder)
    assert loaded.embedding == EmbeddingConfig("last", {"query": "Query: "})
    expected = np.array(lm.model.model(mx.array([lm.tokenizer.encode("Query: cat")]))[0, -1])
    np.testing.assert_allclose(embed(str(folder), "cat", prompt_name="query"), unit(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "kinds", "config", "message"),
    [
        ({"pooling_mode_cls_token": True}, (), {}, "the pooling 'cls_token'"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, (), {}, "mean_tokens and without the prompt"),
        (OLD, ("Dense",), {}, "the module 'Dense'"),
        (OLD, (), {"is_causal": False}, "attention to later tokens"),
    ],
)
def test_what_an_embedding_model_needs_and_mlxlm_lacks_is_named(lm, tmp_path, pooling, kinds, config, message):
    folder = save(lm, tmp_path / "e", "", **config)
    add_modules(folder, pooling, *kinds)
    with pytest.raises(GenerationError, match=message):
        embed(folder, "cat")


def test_broken_files_of_an_embedding_model_are_named(lm, tmp_path):
    folder = save(lm, tmp_path / "e", "")
    add_modules(folder, OLD, prompts={"query": 3})
    with pytest.raises(ConfigError, match=r"config_sentence_transformers.json: prompts is not"):
        mlxlm.load(folder)
    (folder / "config_sentence_transformers.json").write_text('{"default_prompt_name": "query"}')
    with pytest.raises(ConfigError, match="default_prompt_name is 'query'"):
        mlxlm.load(folder)
    (folder / "modules.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"modules.json is not a list"):
        mlxlm.load(folder)


def test_an_encoder_is_refused(tmp_path, lm):
    folder = save(lm, tmp_path / "bert", "", model_type="bert")
    with pytest.raises(CheckpointError, match=r"is an encoder \(bert\), and mlxlm runs decoders"):
        mlxlm.load(folder)


def test_the_hidden_states_end_with_those_after_the_final_norm(lm):
    ids = lm.tokenizer.encode(TEXTS[0])
    states = hidden_states(lm, TEXTS[0])
    assert states.shape == (lm.config.num_hidden_layers + 1, len(ids), 32)
    np.testing.assert_allclose(states[0], np.array(lm.model.model.embed_tokens.weight)[ids], atol=1e-6)
    np.testing.assert_allclose(states[-1], np.array(lm.model.model(mx.array([ids]))[0]), atol=1e-5)
