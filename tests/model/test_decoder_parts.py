"""Every component of the decoder in random combinations: against float64 numpy, in chunks, in training."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.cache import make_cache
from mlxlm.checkpoint.huggingface import write
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.load import load_model
from mlxlm.config import ModelConfig
from mlxlm.families import resolve_model_type
from mlxlm.model import Decoder
from mlxlm.model.decoder import SinusoidalPositions
from mlxlm.utils.errors import GenerationError
from tests.numpy_decoder import LONGEST, VOCABULARY, architectures, decoder, scalings

TEXT = np.random.default_rng(1).integers(0, VOCABULARY, (2, LONGEST - 4))


def with_weights(config, seed=0):
    """A decoder with random parameters, and its weights in float64."""
    model, rng = Decoder(config), np.random.default_rng(seed)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        spread = 0.3 if value.ndim == 1 else value.shape[-1] ** -0.5
        centre = 0.8 if value.ndim == 1 and name.endswith(("weight", "layer_scalar")) else 0.0
        weights[name] = rng.normal(centre, spread, value.shape).astype(np.float32)
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    model.eval()
    return model, {name: value.astype(np.float64) for name, value in weights.items()}


def assert_near(found, wanted, relative=1e-5):
    found = np.array(found)
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max() <= relative * np.abs(wanted).max()


@st.composite
def packed_rows(draw):
    """Segment ids, ascending in each row; None for one text per row."""
    rows = [draw(st.lists(st.booleans(), min_size=TEXT.shape[1], max_size=TEXT.shape[1])) for _ in TEXT]
    return draw(st.none() | st.just(np.cumsum(rows, axis=1)))


@settings(max_examples=100)
@given(architectures(), packed_rows())
def test_logits_equal_numpy(config, segment_ids):
    model, weights = with_weights(config)
    assert config.parameter_count() == sum(weight.size for weight in weights.values())
    arguments = {} if segment_ids is None else {"segment_ids": mx.array(segment_ids, mx.int32)}
    assert_near(model(mx.array(TEXT), **arguments), decoder(weights, config, TEXT, segment_ids), 2e-5)


@pytest.mark.parametrize("share", [0.5, 1.0])
@settings(max_examples=30)
@given(data=st.data())
def test_every_scaling_equals_numpy(share, data):
    scaling = data.draw(scalings(int(16 * share) // 2))
    theta, longest = data.draw(st.sampled_from([50.0, 1000.0])), data.draw(st.sampled_from([8, LONGEST]))
    config = ModelConfig(
        32, 1, 2, 16, VOCABULARY, max_position_embeddings=longest, rope_scaling=scaling, rope_theta=theta,
        partial_rotary_factor=share,
    )  # fmt: skip
    model, weights = with_weights(config)
    assert_near(model(mx.array(TEXT)), decoder(weights, config, TEXT))


@settings(max_examples=35)
@given(architectures(), packed_rows(), st.integers(0, 9))
def test_gradients_equal_finite_differences(config, segment_ids, seed):
    """Along a random direction of all parameters, in float64 by numpy: how the loss of the next token changes."""
    model, weights = with_weights(config)
    model.train()
    arguments = {} if segment_ids is None else {"segment_ids": mx.array(segment_ids, mx.int32)}
    rows, columns = np.indices(TEXT.shape)
    targets = np.roll(TEXT, -1, axis=1)

    def loss(parameters):
        model.update(parameters)
        logits = model(mx.array(TEXT), **arguments)
        picked = mx.take_along_axis(logits, mx.array(targets)[..., None], axis=-1)[..., 0]
        return (mx.logsumexp(logits, axis=-1) - picked).sum()

    gradients = dict(tree_flatten(mx.grad(loss)(model.trainable_parameters())))
    assert gradients.keys() == weights.keys()
    rng = np.random.default_rng(seed)
    direction = {name: rng.normal(size=value.shape) for name, value in weights.items()}
    slope = sum((np.array(gradients[name], np.float64) * direction[name]).sum() for name in weights)

    def at(step):
        logits = decoder({name: w + step * direction[name] for name, w in weights.items()}, config, TEXT, segment_ids)
        return (np.log(np.exp(logits).sum(-1)) - logits[rows, columns, targets]).sum()

    size = np.sqrt(sum((np.array(g, np.float64) ** 2).sum() for g in gradients.values()))
    differences = [(at(step) - at(-step)) / (2 * step) for step in (1e-6, 1e-7)]
    # relu has kinks: where the two steps disagree one lies between, and neither is a derivative.
    if abs(differences[0] - differences[1]) < 1e-4 * size:
        assert abs(slope - differences[0]) <= 5e-4 * size


cuts = st.lists(st.integers(1, TEXT.shape[1] - 1), max_size=4, unique=True).map(sorted)


def in_chunks(model, tokens, ends, cache):
    parts = [model(mx.array(tokens[:, a:b]), cache) for a, b in zip([0, *ends], [*ends, None], strict=True)]
    return mx.concatenate(parts, axis=1)


@settings(max_examples=40)
@given(architectures(), cuts)
def test_chunks_with_a_cache_equal_one_call(config, ends):
    model, _ = with_weights(config)
    text, cache = TEXT[:1], make_cache(model)
    for layer in cache:
        layer.long_factors = text.shape[1] > (config.longrope_original_length or 0)
    whole = np.array(model(mx.array(text)))
    if (config.rope_scaling or {}).get("rope_type") == "dynamic" and text.shape[1] > config.max_position_embeddings:
        return  # keys in a cache keep the base that they had
    assert_near(in_chunks(model, text, ends, cache), whole, 2e-5)


@settings(max_examples=30)
@given(architectures(), st.integers(1, TEXT.shape[1] - 1), cuts)
def test_left_padded_batch(config, pad, ends):
    model, _ = with_weights(config)
    if not model.supports_batching:
        return
    text, cache = TEXT.copy(), make_cache(model)
    text[1, pad:], ends = TEXT[1, : TEXT.shape[1] - pad], [end for end in ends if end > pad]
    for layer in cache:
        layer.set_left_padding([0, pad])
    found = np.array(in_chunks(model, text, ends, cache))
    assert_near(found[0], np.array(model(mx.array(text[:1])))[0], 2e-5)
    assert_near(found[1, pad:], np.array(model(mx.array(text[1:, pad:])))[0], 2e-5)


@settings(max_examples=20)
@given(config=architectures())
def test_saved_model_loads_unchanged(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, weights = with_weights(config)
    write(folder, {}, config, {name: lazy_tensor(value) for name, value in tree_flatten(model.parameters())}, None)
    again, found = load_model(folder)
    assert found == resolve_model_type(config)
    assert found.with_changes(model_type="llama") == config
    assert json.loads((folder / "config.json").read_text())["model_type"] == found.model_type
    assert mx.array_equal(again(mx.array(TEXT)), model(mx.array(TEXT)))


def test_sinusoidal_positions():
    table = np.array(SinusoidalPositions(9000, 512)(mx.array([0, 1, 8999])))
    assert table[0, :4].tolist() == [0, 1, 0, 1]
    np.testing.assert_allclose(table[1, :2], [np.sin(1), np.cos(1)], atol=1e-7)
    assert abs(table[2, 256] - np.sin(8999 / 10000**0.5)) < 1e-7
    assert abs(table[2, 511] - np.cos(8999 / 10000 ** (510 / 512))) < 1e-7
    odd = np.array(SinusoidalPositions(5, 3)(mx.array([2])))[0]
    np.testing.assert_allclose(odd, [np.sin(2), np.cos(2), np.sin(2 / 10000 ** (2 / 3))], atol=1e-7)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_positions_beyond_the_table(positions):
    model = Decoder(ModelConfig(16, 1, 2, 16, 31, max_position_embeddings=8, positions=positions))
    cache = make_cache(model)
    model(mx.zeros((1, 8), mx.int32), cache)
    with pytest.raises(GenerationError, match="position 9 is beyond the model.s 8 positions"):
        model(mx.zeros((1, 1), mx.int32), cache)


def test_packed_texts_have_no_cache():
    model = Decoder(ModelConfig(16, 1, 2, 16, VOCABULARY))
    with pytest.raises(ValueError, match="segment_ids"):
        model(mx.array(TEXT), make_cache(model), segment_ids=mx.zeros(TEXT.shape, mx.int32))


@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_a_product_with_its_weight(tied):
    model, weights = with_weights(ModelConfig(16, 1, 2, 16, VOCABULARY, tie_word_embeddings=tied))
    hidden = model.model(mx.array(TEXT))
    assert_near(model.head(hidden), np.array(hidden, np.float64) @ np.array(model.head_weight, np.float64).T)


def test_dropout_of_embeddings_and_sublayer_outputs():
    model = Decoder(ModelConfig(16, 1, 2, 16, VOCABULARY), dropout=0.5)
    model.init_weights(0)
    tokens = mx.array(TEXT)
    model.train()
    kept = np.array(model.model.embed(tokens)) / np.array(model.model.embed_tokens(tokens))
    assert set(np.round(kept, 5).flatten()) == {0.0, 2.0} and 0.3 < (kept > 0).mean() < 0.7
    model.layers[0].dropout.eval()
    model.model.dropout.eval()
    assert mx.array_equal(model(tokens), model(tokens))  # attention's weights and the head have none
    model.layers[0].dropout.train()
    assert not mx.array_equal(model(tokens), model(tokens))


@pytest.mark.parametrize("placement", ["pre", "post", "output", "both"])
def test_initialization_of_a_deep_decoder(placement):
    """Twelve layers: logits of a fresh model say little, and every layer's gradient is of one order of magnitude."""
    model = Decoder(ModelConfig(64, 12, 4, 128, VOCABULARY, norm_placement=placement, norm="layer"))
    model.init_weights(0)
    logits = model(mx.array(TEXT))
    assert mx.std(logits).item() < 1

    def loss(parameters):
        model.update(parameters)
        logits = model(mx.array(TEXT))
        return (mx.logsumexp(logits, axis=-1) - logits[..., 5]).mean()

    gradients = mx.grad(loss)(model.trainable_parameters())["model"]["layers"]
    for module, projection in (("self_attn", "v_proj"), ("mlp", "down_proj")):
        sizes = [mx.linalg.norm(layer[module][projection]["weight"]).item() for layer in gradients]
        assert max(sizes) < 15 * min(sizes), (module, sizes)
