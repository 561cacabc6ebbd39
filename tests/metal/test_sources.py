"""What every file of `metal_kernels/` must be."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.kernels.metal import MetalKernel, scalar
from mlxlm.utils.resources import resource

FILES = sorted([*resource("metal_kernels").glob("*.metal"), *resource("metal_kernels").glob("*.h")])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_source_is_ascii_and_begins_with_what_it_is(file):
    """MLX hands it to Apple's compiler as ASCII."""
    text = file.read_text(encoding="ascii")
    assert text.startswith("// ")
    if file.suffix == ".metal":
        comment = text.split("\n\n", 1)[0].lower()
        for part in ("input", "output", "grid", "template"):
            assert part in comment, part


def test_launches_get_the_code_without_comments_in_the_same_lines():
    kernel = MetalKernel("attention_decode", (), (), headers=("common.h", "attention_decode.h"))
    for text, name in ((kernel.source, "attention_decode.metal"), (kernel.header, "attention_decode.h")):
        written = resource("metal_kernels", name).read_text(encoding="ascii").split("\n")
        code = text.split(f'#line 1 "{name}"\n')[-1].split("\n")
        assert "//" not in text and sum(map(len, code)) < 0.85 * sum(map(len, written))
        assert all(short in long for short, long in zip(code, written, strict=False))


def test_a_scalar_is_shared_by_traces_and_threads():
    def scaled(x):
        return x * scalar(0.5, mx.float32) + scalar(0.5, mx.float32)

    step = mx.compile(scaled)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda n: step(mx.full(4, n)).tolist(), range(4))) == [[n / 2 + 0.5] * 4 for n in range(4)]
    assert scalar(0.5, mx.float32) is scalar(0.5, mx.float32) and scaled(mx.array(1.0)).item() == 1.0
