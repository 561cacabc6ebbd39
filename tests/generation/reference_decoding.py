"""A naive generation loop to compare with, a batch of one row, a prompt, and small models of mlx_lm."""

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation import Context, GenerationOptions, Sampler
from mlxlm.generation.certainty import margin_for
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.decoding import Batch, Row

PROMPT = [5, 9, 200, 17, 33, 33, 90, 41, 7, 123, 64]


def naive(model, prompt, n):
    """Greedy tokens, each from a forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(model(mx.array([ids]))[0, -1].argmax().item())
    return ids[len(prompt) :]


class Counting:
    """A model that records how many tokens each call reads."""

    def __init__(self, model):
        self._model, self.layers, self.calls = model, model.layers, []

    def __call__(self, ids, cache=None):
        self.calls.append(ids.shape[1])
        return self._model(ids, cache=cache)


def greedy_sampler(prompt=PROMPT):
    return Sampler(GenerationOptions(temperature=0), prompt, 0)


def batch_of_one(model, prompt, count, *, kv=None, sampler=None, speculation=None):
    """A batch whose only row has read its prompt, and the row."""
    kv, context, row = kv or KVOptions(), Context(model, kv), Row(prompt, count)
    context.read(prompt[:-1], 4)
    row.sampler = sampler or greedy_sampler(prompt)
    batch = Batch(DecodeStep(model), UNLIMITED, margin_for(kv), speculation and speculation.begin(model, kv, prompt))
    batch.join([row], context.caches)
    return batch, row


def decode(batch, row, count=UNLIMITED):
    """Step until the row has ended or has `count` tokens; its tokens."""
    while not row.finished and len(row.tokens) < count:
        batch.step()
    return row.tokens.tolist()


def held(batch, row):
    """The tokens that the caches hold, which all layers agree on."""
    ids, caches = batch.row_caches(row)
    assert {cache.offset for cache in caches} == {len(ids)}
    return ids


def mlx_lm_model(kind, **settings):
    """A small model of mlx_lm with random weights."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
    mx.random.seed(1)
    model_class, arguments = utils._get_classes({"model_type": kind})
    return model_class(arguments.from_dict({"model_type": kind} | sizes | heads | settings))


STATE_SPACE = {"state_size": 4, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 2}
