"""Names of a package that are imported when they are first used."""

import pytest

from mlxlm import generation


def test_names_are_imported_and_others_refused():
    from mlxlm.generation.options import GenerationOptions

    assert generation.GenerationOptions is GenerationOptions
    with pytest.raises(AttributeError, match="module 'mlxlm.generation' has no attribute 'nothing'"):
        generation.nothing  # noqa: B018
