"""A tiny chat model: random weights, a template with roles; in memory and as a folder."""

import pytest

from mlxlm import tokenizer
from mlxlm.backend.mlx import mx
from mlxlm.generation import LoadedModel
from mlxlm.model import Decoder
from tests.small_models import write_folder

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = 7  # special tokens of a trained tokenizer
CONTEXT = 4096  # an answer is long enough to be interrupted
TEXT = ["The quick brown fox jumps over the lazy dog. Grüße, 世界! How are you today?\n" * 4]


@pytest.fixture
def tokens():
    trained = tokenizer.train(TEXT, 300)
    trained.chat_template = TEMPLATE
    return trained


@pytest.fixture(scope="session")
def decoder(tiny_config):
    """A model whose answers don't end by themselves."""
    model = Decoder(tiny_config.with_changes(tie_word_embeddings=False, max_position_embeddings=CONTEXT))
    model.init_weights(seed=3)
    # Logits far apart, so that rounding decides nothing, but 0 for the special tokens: they would end answers.
    model.lm_head.weight = model.lm_head.weight * 20 * (mx.arange(300) >= SPECIAL)[:, None]
    mx.eval(model.parameters())
    return model


@pytest.fixture
def lm(tokens, decoder, tmp_path):
    """The model in memory; `replace` its parts at will."""
    return LoadedModel(decoder, tokens, decoder.config, tmp_path)


@pytest.fixture
def model_folder(tokens, decoder, tmp_path):
    """The same model as a folder."""
    return write_folder(tmp_path / "tiny", decoder, decoder.config, tokens)
