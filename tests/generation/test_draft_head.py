"""Draft heads: the texts and their distribution stay the same; what a head reads; its file; its training."""

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn, tree_map
from mlxlm.cache import KVCache, KVOptions, fingerprint
from mlxlm.generation import Engine, GenerationOptions, LoadedModel, Request, Sampler
from mlxlm.generation.draft_head import BoundHead, DraftHead, is_draft_head
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.model import Decoder, MTPModule
from mlxlm.train.draft_head import layer_config, train_draft_head
from mlxlm.train.draft_settings import DraftSettings
from mlxlm.utils.errors import CheckpointError, DataError, GenerationError, MlxlmError
from tests.generation.fake_drafters import Greedy, always
from tests.generation.reference_decoding import PROMPT, STATE_SPACE, mlx_lm_model

KINDS = {
    "tied": {"tie_word_embeddings": True},
    "bias, soft cap": {"head_bias": True, "final_logit_softcapping": 5.0},
    "quantized": {"quantization": {"group_size": 32, "bits": 8}},
}


def make(lm, **changes):
    """A model of a kind, with logits near enough to each other for sampling."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = lm.config.with_changes(**sizes, **changes)
    model = Decoder(config)
    model.init_weights(seed=5)
    if "head_bias" in changes:
        model.lm_head.bias = mx.sin(mx.arange(config.vocab_size))
    if config.quantization:
        nn.quantize(model, **config.quantization)
    mx.eval(model.parameters())
    return LoadedModel(model, lm.tokenizer, config, lm.path)


def random_head(lm, num_tokens=100):
    module = MTPModule(layer_config(lm.config))
    module.update(
        tree_map(lambda x: x + 0.3 * mx.random.normal(x.shape, key=mx.random.key(x.size)), module.parameters())
    )
    token_ids = mx.arange(num_tokens, dtype=mx.int32) * 2 + 1
    mx.eval(module.parameters(), token_ids)
    return DraftHead(module, token_ids, fingerprint(lm.model))


@pytest.fixture(scope="module")
def tied(lm):
    return make(lm, **KINDS["tied"])


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. How are you today? " * 60, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(tied, text_file):
    return train_draft_head(tied, [text_file], DraftSettings(num_tokens=8192, vocab_size=200, epochs=3))


def generate(lm, speculation, prompt=PROMPT, **options):
    engine = Engine(lm, speculation=speculation, prefix_cache_bytes=0)
    return engine.submit(Request(prompt, GenerationOptions.of(deterministic=False, **options))).result()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}])
def test_a_random_head_changes_no_text(lm, kind, options):
    model = make(lm, **KINDS[kind])
    speculation = always(random_head(model), 4)
    found, wanted = (generate(model, s, max_tokens=40, **options) for s in (speculation, None))
    assert found.tokens == wanted.tokens and speculation.stats.proposed > 0


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.7, "seed": 3}, {"temperature": 0, "regex": "[a-z ]+"}]
)
def test_a_trained_head_changes_no_text_and_is_often_right(tied, trained, options):
    speculation = always(trained[0], 3)
    prompt = tied.tokenizer.encode("The quick brown fox jumps over")
    found, wanted = (generate(tied, s, prompt, max_tokens=80, **options) for s in (speculation, None))
    assert found.tokens == wanted.tokens
    assert speculation.stats.accepted > 10


def test_training_lowers_the_loss(trained):
    head, report = trained
    assert report.losses[0] > report.losses[1] > report.losses[-1] and len(report.losses) == 4
    assert report.tokens == 8192 and 0.5 < report.coverage <= 1
    assert head.token_ids.size <= 200 and report.accuracy[0] > 0.3


def test_a_draft_is_that_of_a_head_that_reads_everything_anew(tied):
    """Whatever was drafted, read and skipped before."""
    head, rng = random_head(tied), np.random.default_rng(0)
    bound, state = BoundHead(head.module, head.token_ids, tied.model), head.begin(tied.model, KVOptions(), PROMPT)
    tokens, states = [], mx.zeros((0, 64))
    for count in rng.integers(1, 6, 12).tolist():
        new = rng.integers(0, 300, count).tolist()
        tokens, states = [*tokens, *new], mx.concatenate([states, mx.array(rng.normal(size=(count, 64)), mx.float32)])
        state.read(new[:1], states[-count : len(tokens) - count + 1])
        if count > 1:
            state.read(new[1:], states[1 - count :])
        found = state.propose(count, Greedy(), 300).tolist()
        cache, hidden, expected = KVCache(), states, mx.array(tokens)
        for guess in found:
            hidden, logits = bound.predict(hidden, expected, cache)
            expected = mx.argmax(logits, axis=-1)
            assert guess == expected.item() and guess in head.token_ids
    assert not state.is_behind


def test_after_a_pause_the_last_tokens_are_read(tied):
    head = random_head(tied)
    states = mx.random.normal((300, 64), key=mx.random.key(0))
    late, early = (head.begin(tied.model, KVOptions(), PROMPT) for _ in range(2))
    late.read([7] * 44, states[:44])
    late.read([9] * 256, states[44:])
    early.read([9] * 256, states[44:])
    assert late.is_behind
    assert late.propose(3, Greedy(), 300).tolist() == early.propose(3, Greedy(), 300).tolist()


def test_the_distribution_of_sampled_tokens():
    """Of a million draws from eight tokens, of which a draft knows the noise, each has its share."""
    probabilities = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.05, 0.04, 0.01])
    logits = mx.array(np.log(probabilities), mx.float32)
    counts, accepted = np.zeros(8), 0
    for seed in range(250):
        sampler = Sampler(GenerationOptions(temperature=1.0), [], seed)
        rows = mx.broadcast_to(logits, (4000, 8))
        # A drafter that draws from a flatter distribution with the text's noise.
        draft, _ = sampler.verify_draft(rows * 0.5, mx.zeros(3999, mx.int32), None)
        tokens, _ = sampler.verify_draft(rows, draft[1:], None)
        accepted += (tokens == draft).sum().item()
        counts += np.bincount(np.array(tokens), minlength=8)
    expected = probabilities * counts.sum()
    assert counts.sum() == 1_000_000 and 600_000 < accepted < 999_000
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # chi-square of 7 degrees of freedom, p = 0.001


def test_the_file(tied, tmp_path):
    head = random_head(tied)
    head.save(tmp_path / "head")
    found = DraftHead.load(tmp_path / "head")
    assert is_draft_head(tmp_path / "head") and not is_draft_head(tmp_path)
    assert found.target == head.target and found.token_ids.tolist() == head.token_ids.tolist()
    x = mx.random.normal((1, 3, 64), key=mx.random.key(0))
    assert mx.array_equal(found.module(x, x), head.module(x, x))
    with pytest.raises(CheckpointError, match="exists"):
        head.save(tmp_path / "head")


def change(**values):
    def apply(folder):
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}), encoding="utf-8")

    return apply


def change_tensors(function):
    def apply(folder):
        tensors = mx.load(str(folder / "model.safetensors"))
        function(tensors)
        mx.eval(tensors)
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change(model_type="llama"), "is not that of a draft head"),
        (change(target=7), "is not that of a draft head"),
        (change(hidden_size="64"), "hidden_size is '64'"),
        (change(rope_theta=-1), "rope_theta is -1"),
        (change(num_key_value_heads=3), "config.json: .*num_key_value_heads"),
        (change(intermediate_size=100), "layers.0.mlp.down_proj.weight is missing or has another shape"),
        (change_tensors(lambda tensors: tensors.pop("fc.weight")), "fc.weight is missing"),
        (change_tensors(lambda tensors: tensors.pop("token_ids")), "token_ids is missing"),
        (change_tensors(lambda tensors: tensors.update(token_ids=mx.array([5, 300]))), "token_ids has tokens that"),
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 40), "not a valid safetensors file"),
    ],
)  # fmt: skip
def test_files_that_are_damaged(tied, tmp_path, damage, message):
    random_head(tied).save(tmp_path / "head")
    damage(tmp_path / "head")
    with pytest.raises(MlxlmError, match=message):
        DraftHead.load(tmp_path / "head")


def test_a_head_of_another_model_is_refused(lm, tied):
    speculation = SpeculativeDecoder(random_head(tied))
    Engine(tied, speculation=speculation)
    model = mlx_lm_model("mamba", **STATE_SPACE)
    for other in (lm, LoadedModel(model, lm.tokenizer, lm.config, lm.path)):
        with pytest.raises(GenerationError, match="was trained for another model than .*mlxlm draft"):
            Engine(other, speculation=speculation)


def test_models_and_texts_without_a_head(lm, tied, tmp_path, text_file):
    model = mlx_lm_model("mamba", **STATE_SPACE)
    with pytest.raises(GenerationError, match="gives no hidden states"):
        train_draft_head(LoadedModel(model, lm.tokenizer, lm.config, lm.path), [text_file])
    (tmp_path / "short.txt").write_text("a word", encoding="utf-8")
    with pytest.raises(DataError, match="tokens"):
        train_draft_head(tied, [tmp_path / "short.txt"])
