"""Settings that contradict each other or can't work."""

import pytest

from mlxlm.quantize import quantize
from mlxlm.utils.errors import ConfigError


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bits": 7, "method": "magic"}, "`bits` is 7, it must be one of 2, 3, .*; `method` is 'magic'"),
        ({"mode": "int4"}, "`mode` is 'int4', it must be one of affine, mxfp4"),
        ({"recipe": "mixed_3_4", "max_kl": 1.0}, "`recipe` and `max_kl` both choose"),
        ({"bits": 4, "max_size": 10**6}, "`bits` and `max_size` both choose"),
        ({"mode": "nvfp4", "target_bpw": 4.0}, "`target_bpw` would have no effect: nvfp4 has fixed bits"),
        ({"max_kl": -1.0}, "`max_kl` is -1.0, it must be a number above 0"),
        ({"calibration_text": "x.txt", "method": "rtn"}, "`calibration_text` would have no effect"),
        ({"eval_text": "x.txt", "evaluate": False}, "`eval_text` would have no effect"),
    ],
)
def test_invalid_settings(model, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        quantize(model, tmp_path / "out", **settings)
    assert list(tmp_path.iterdir()) == []
