"""The check of a kernel's first use on a machine, with the real kernels: right ones pass, spoiled ones do not."""

import pytest

from mlxlm.kernels import dispatch, measurements
from mlxlm.kernels.attention_dispatch import DECODE, PREFILL, QUANTIZED, TRAINING, attention_case
from mlxlm.kernels.dispatch import Case
from mlxlm.kernels.metal import MetalKernel
from mlxlm.kernels.rms_norm import ADD_NORM, NORM
from mlxlm.utils.errors import PlatformError


def attend(operation, dtype, T, *features, **form):
    return operation, attention_case(operation, dtype, 32, 4, 2, T, 4096, features, **form)


CASES = [
    (NORM, Case("rms_norm", "bfloat16", ("N", "rows"), (96, 4096))),
    (ADD_NORM, Case("add_rms_norm", "float16", ("N", "rows"), (600, 4096), ("weight:float32",))),
    attend(DECODE, "float32", 1),
    attend(DECODE, "float16", 3, "window", "softcap"),
    attend(QUANTIZED, "bfloat16", 1, group_size=32, key_bits=4, value_bits=4),
    attend(PREFILL, "float16", 2048),
    attend(TRAINING, "float32", 2048, "window"),
]


@pytest.fixture(autouse=True)
def only_metal(new_machine, monkeypatch):
    monkeypatch.setattr(dispatch, "_environment", "metal")


@pytest.mark.parametrize("operation, case", CASES, ids=lambda x: str(x).split()[0] if isinstance(x, Case) else "")
def test_right_kernels_pass(metal, operation, case):  # a warning would be followed by an error of the mode
    assert dispatch.choose_path(operation, case).path == "metal"


SPOILED = {
    "parts of the keys not combined": ("attention_decode_combine", CASES[2], lambda out: [0 * out[0]]),
    "gradients of keys and values exchanged": ("attention_grad_key_value", CASES[6], lambda out: out[::-1]),
    "gradient of the weight of one team only": ("rms_norm_grad", CASES[0], lambda out: [out[0], out[1][:1]]),
    "a kernel that does not compile": ("attention_forward", CASES[5], lambda out: 1 / 0),
}


@pytest.mark.parametrize("what", SPOILED)
def test_spoiled_kernels_are_switched_off(metal, what, monkeypatch):
    name, (operation, case), spoil = SPOILED[what]
    launch = MetalKernel.__call__

    def spoiled(kernel, *args, **kwargs):
        out = launch(kernel, *args, **kwargs)
        return spoil(out) if kernel.name == name else out

    monkeypatch.setattr(MetalKernel, "__call__", spoiled)
    with pytest.warns(UserWarning, match="on this machine"), pytest.raises(PlatformError, match="on this machine"):
        dispatch.choose_path(operation, case)
    assert not measurements.cache_path().exists()
