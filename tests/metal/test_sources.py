"""What every file of `metal_kernels/` must be."""

import pytest

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
