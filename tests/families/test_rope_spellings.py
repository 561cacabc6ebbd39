"""Every way to write RoPE settings in config.json, in every family: transformers' logits, or an error naming a field.

Spellings that give the same configuration are run once.
"""

import json
import re

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.load import load_model
from mlxlm.checkpoint.mlx_lm.install_rope import with_rope_parameters
from mlxlm.families import config_from_hf, config_to_hf, unsupported_feature
from mlxlm.utils.errors import MlxlmError

torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")
transformers_oracle = pytest.importorskip("tests.transformers_oracle")
through_mlx_lm = pytest.importorskip("tests.families.test_through_mlx_lm")

THETA, CONTEXT, ORIGINAL = 123.0, 20, 16
VOCABULARY = 97
TOKENS = np.random.default_rng(1).integers(3, VOCABULARY, (1, 24))
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": CONTEXT,
}  # fmt: skip
NATIVE = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2"), SIZES)
NEOX = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
NATIVE["gpt_neox"] = {**NEOX, "intermediate_size": 128}  # which mlx_lm requires
NATIVE["lfm2"] = {**SIZES, "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
NATIVE["falcon"] = {k: v for k, v in NEOX.items() if k != "intermediate_size"}
NO_ROPE = ("mamba", "mamba2", "falcon_mamba", "gpt_bigcode")
NOT_RUN = (*NO_ROPE, "olmo_hybrid")  # which has no RoPE without a base
FAMILIES = {**{name: values for name, values in through_mlx_lm.CASES.items() if name not in NOT_RUN}, **NATIVE}
PARTIAL = {"gpt_neox": 0.5, "phi3": 0.5}
ROPE_FIELDS = {
    "rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor", "rotary_pct",
    "rotary_emb_base", "original_max_position_embeddings",
}  # fmt: skip
OF_MLX_LM = dict.fromkeys(("smollm3", "deepseek_v3"), ("default", "yarn", "llama3", "longrope"))
ERROR = "rope|rotary|factor|original_max|model_type 'falcon'"


def scalings(pairs):
    original = {"original_max_position_embeddings": ORIGINAL}
    short, long = ([first + i / 2 for i in range(pairs)] for first in (1.0, 3.0))
    return {
        "default": {},
        "yarn": {"factor": 4.0, **original},
        "longrope": {"short_factor": short, "long_factor": long, **original},
        "linear": {"factor": 4.0},
        "dynamic": {"factor": 4.0},
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **original},
    }


def spellings(kind, scaling, partial, names):
    """The fields of config.json in the forms of transformers 4 and 5, both, and mixtures."""
    factor = {} if partial is None else {"partial_rotary_factor": partial}
    theta, outside = {names[0]: THETA}, {} if partial is None else {names[1]: partial}
    plain = {"rope_type": "default", "rope_theta": THETA, **factor}
    new = {**plain, "rope_type": kind, **scaling}
    old = None if kind == "default" else {"rope_type": kind, **scaling}
    typed = None if kind == "default" else {"type": kind, **scaling}

    def without(*removed):
        return {name: value for name, value in new.items() if name not in removed}

    yield {**theta, **outside, "rope_scaling": typed}
    yield {**theta, **outside, "rope_scaling": old}
    yield {"rope_parameters": new}
    yield {"rope_parameters": {**without("rope_type"), "type": kind}}
    yield {"rope_parameters": {**new, "type": "linear"}}
    yield {"rope_parameters": new, "rope_scaling": typed, **theta, **outside}
    # YaRN added by hand to a file of transformers 5, whose base transformers then ignores.
    yield {"rope_parameters": plain, "rope_scaling": typed}
    yield {"rope_parameters": plain, "rope_scaling": old and {**old, "rope_theta": THETA, **factor}}
    yield {"rope_parameters": plain, "rope_scaling": typed, **theta, **outside}
    yield {"rope_parameters": {**plain, "rope_theta": 1e4}, "rope_scaling": typed, **outside}
    yield {**outside, "rope_scaling": old}
    yield {"rope_parameters": without("rope_theta")}
    yield {"rope_parameters": without("rope_theta"), **theta}
    yield {"rope_parameters": new, names[0]: 50.0}
    yield {"rope_parameters": without("partial_rotary_factor"), **outside}
    yield {"rope_parameters": without("partial_rotary_factor")}
    yield {"rope_parameters": new, "partial_rotary_factor": 0.25}
    yield {"rope_parameters": without("rope_theta"), "rotary_emb_base": 77.0, "rotary_pct": 0.25}
    yield {"rope_parameters": without("original_max_position_embeddings"), "original_max_position_embeddings": 12}
    yield {"rope_parameters": new, "original_max_position_embeddings": 12}
    yield {**theta, **outside, "rope_scaling": {**old, "original_max_position_embeddings": None} if old else {}}
    yield {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), new)}
    yield {"rope_parameters": {"sliding_attention": plain, "full_attention": new}, names[0]: 50.0}
    yield {"rope_parameters": {"sliding_attention": plain, "full_attention": without("rope_theta")}}
    yield {**theta, "rope_local_base_freq": 50.0, "rope_scaling": old}
    yield {"rope_parameters": 5}
    yield {"rope_parameters": plain, "rope_scaling": 5}
    yield {}


class Logits:
    """Logits of transformers and of this package for configurations of one model; None if it can't run."""

    def __init__(self, family, folder):
        oracle = transformers_oracle.make_oracle(family, FAMILIES[family], VOCABULARY, "eager")
        oracle.save_pretrained(folder)
        self._folder, self._weights, self._memo = folder, oracle.state_dict(), {}
        self.saved = {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k not in ROPE_FIELDS}

    def of_transformers(self, values, length):
        try:
            config = transformers.AutoConfig.for_model(**values)
            original = values.get("original_max_position_embeddings")  # read only when the model is built
            key = json.dumps([config.rope_parameters, original, length], sort_keys=True)
            if key not in self._memo:
                model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
                model.float().load_state_dict(self._weights)
                self._memo[key] = transformers_oracle.logits_of(model, TOKENS[:, :length])
            return self._memo[key]
        except Exception:  # of many kinds
            return None

    def of_mlxlm(self, values):
        """Raises an MlxlmError if it can't run."""
        native = unsupported_feature(values) is None
        key = repr(config_from_hf(values) if native else with_rope_parameters(values))
        if key not in self._memo:
            (self._folder / "config.json").write_text(json.dumps(values))
            model, config = load_model(self._folder)
            tokens = TOKENS if native else TOKENS[:, : config.max_position_embeddings]
            self._memo[key] = np.array(model(mx.array(tokens)).astype(mx.float32))
        return self._memo[key]


def differs(found, wanted):
    return wanted is not None and not np.abs(found - wanted).max() < 2e-3 * wanted.std()


@pytest.mark.parametrize("family", FAMILIES)
def test_spellings(family, tmp_path):
    logits = Logits(family, tmp_path)
    saved, partial = logits.saved, FAMILIES[family].get("rope_parameters", {}).get("partial_rotary_factor")
    partial = PARTIAL.get(family, partial)
    head_dim = saved.get("head_dim") or saved["hidden_size"] // saved["num_attention_heads"]
    pairs = int(saved.get("qk_rope_head_dim", head_dim) * (partial or 1)) // 2
    names = ("rotary_emb_base", "rotary_pct") if family == "gpt_neox" else ("rope_theta", "partial_rotary_factor")
    num_run = 0
    for kind, scaling in scalings(pairs).items():
        if family not in NATIVE and kind not in OF_MLX_LM.get(family, ("default", "yarn")):
            continue  # one function computes all of them
        for fields in spellings(kind, scaling, partial, names):
            values = json.loads(json.dumps({**saved, **fields}))
            try:
                found = logits.of_mlxlm(values)
            except MlxlmError as error:
                assert re.search(ERROR, str(error)), (fields, error)
                continue
            wanted = logits.of_transformers(values, found.shape[1])
            assert not differs(found, wanted), fields
            num_run += wanted is not None
            if unsupported_feature(values) is None:  # what we write
                assert not differs(found, logits.of_transformers(config_to_hf(config_from_hf(values)), found.shape[1]))
    assert num_run > 10
