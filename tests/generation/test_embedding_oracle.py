"""A Qwen3-Embedding of random weights against transformers, with the pooling of its model card."""

import json

import numpy as np
import pytest

import mlxlm
from mlxlm import tokenizer
from mlxlm.generation.embedding import embed, hidden_states

torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers (pip install transformers)")
transformers_oracle = pytest.importorskip("tests.transformers_oracle")

TRAINING = "The quick brown fox jumps over the lazy dog. Grüße, 世界! How are you today?\n"
TEXTS = ["The quick brown fox", "How?", "Grüße, 世界!", "dog " * 40, "a lazy dog. " * 9]
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What Qwen publishes: the backbone alone, the files of sentence-transformers, EOS after each text."""
    folder = tmp_path_factory.mktemp("embedding") / "model"
    oracle = transformers_oracle.make_oracle("qwen3", SIZES, 300)
    oracle.model.save_pretrained(folder)
    trained = tokenizer.train([TRAINING * 4], 300)
    trained.save(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    eos = content["added_tokens"][1]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": eos["content"], "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {eos["content"]: {"id": eos["content"], "ids": [eos["id"]], "tokens": [eos["content"]]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    kinds = ["Transformer", "Pooling", "Normalize"]
    modules = [
        {"path": f"{n}_{kind}" if n else "", "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true, "include_prompt": true}')
    return folder


def test_embeddings_and_hidden_states_are_those_of_transformers(folder):
    lm = mlxlm.load(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left", pad_token="<|pad|>")
    oracle = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = theirs(TEXTS, padding=True, return_tensors="pt")
    assert lm.tokenizer.encode(TEXTS[1]) == theirs(TEXTS[1])["input_ids"]
    with torch.no_grad():
        last = oracle(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state[:, -1]
        states = oracle(**theirs([TEXTS[0]], return_tensors="pt"), output_hidden_states=True).hidden_states
    expected = torch.nn.functional.normalize(last, dim=1).numpy()
    np.testing.assert_allclose(embed(lm, TEXTS), expected, atol=2e-5)
    short = torch.nn.functional.normalize(last[:, :8], dim=1).numpy()
    np.testing.assert_allclose(embed(lm, TEXTS, dimensions=8), short, atol=2e-5)
    np.testing.assert_allclose(hidden_states(lm, TEXTS[0]), torch.cat(states).numpy(), atol=1e-4, rtol=1e-3)
