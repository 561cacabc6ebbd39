"""The check on first use with the real kernels: correct ones pass, broken ones are disabled."""

import pytest

from mlxlm.kernels import dispatch, measurements
from mlxlm.kernels.attention import DECODE, PREFILL, QUANTIZED, TRAINING, attention_case
from mlxlm.kernels.dispatch import Case
from mlxlm.kernels.metal import MetalKernel
from mlxlm.kernels.qk_norm_rope import QK_NORM_ROPE
from mlxlm.kernels.quantile import QUANTILE
from mlxlm.kernels.rms_norm import ADD_NORM, NORM
from mlxlm.utils.errors import PlatformError


def attend(operation, dtype, T, *features, **form):
    return operation, attention_case(operation, dtype, 32, 4, 2, T, 4096, features, **form)


CASES = [
    (NORM, Case("rms_norm", "bfloat16", ("N", "rows"), (96, 4096))),
    (ADD_NORM, Case("add_rms_norm", "float16", ("N", "rows"), (600, 4096), ("weight:float32",))),
    attend(DECODE, "float32", 1),
    attend(QUANTIZED, "bfloat16", 1, group_size=32, key_bits=4, value_bits=4),
    attend(PREFILL, "float16", 2048),
    attend(TRAINING, "float32", 2048, window=256),
    attend(TRAINING, "bfloat16", 2048, "segment_ids"),
    (QK_NORM_ROPE, Case("qk_norm_rope", "bfloat16", ("D", "dims", "H", "K", "rows"), (80, 20, 4, 2, 8), ("norm",))),
    (QUANTILE, Case("weighted_quantile", "float32", ("N",), (4096,))),
    (QUANTILE, Case("weighted_quantile", "float32", ("N",), (4096,), ("count",))),
]


@pytest.fixture(autouse=True)
def only_metal(new_machine, monkeypatch):
    monkeypatch.setattr(dispatch, "_environment", "metal")


@pytest.mark.parametrize(
    "operation, case",
    [case for case in CASES if case[0] is not PREFILL],
    ids=lambda x: str(x).split()[0] if isinstance(x, Case) else "",
)
def test_correct_kernels_pass(metal, operation, case):
    assert dispatch.choose_path(operation, case).path == "metal"


BROKEN = {
    "parts of the keys not combined": ("attention_decode_combine", CASES[2], lambda out: [0 * out[0]]),
    "gradients of keys and values exchanged": ("attention_grad_key_value", CASES[5], lambda out: out[::-1]),
    "gradient of the weight of one team only": ("rms_norm_grad", CASES[0], lambda out: [out[0], out[1][:1]]),
    "keys of another row": ("qk_norm_rope", CASES[7], lambda out: [out[0], out[1][::-1]]),
    "a kernel that does not compile": ("attention_forward", CASES[4], lambda out: 1 / 0),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_disabled(metal, what, monkeypatch):
    name, (operation, case), change = BROKEN[what]
    launch = MetalKernel.__call__

    def broken(kernel, *args, **kwargs):
        out = launch(kernel, *args, **kwargs)
        return change(out) if kernel.name == name else out

    monkeypatch.setattr(MetalKernel, "__call__", broken)
    with pytest.warns(UserWarning, match="on this machine"), pytest.raises(PlatformError, match="on this machine"):
        dispatch.choose_path(operation, case)
    assert not measurements.cache_path().exists()
