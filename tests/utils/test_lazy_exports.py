"""Names of a package that are imported when they are first used."""

from importlib import import_module
from pathlib import Path

import pytest

import mlxlm
from mlxlm import generation

PACKAGE = Path(mlxlm.__file__).parent
LAZY = [path.parent.name for path in PACKAGE.glob("*/__init__.py") if "lazy_exports(" in path.read_text()]


def test_names_are_imported_and_others_refused():
    from mlxlm.generation.options import GenerationOptions

    assert generation.GenerationOptions is GenerationOptions
    with pytest.raises(AttributeError, match="module 'mlxlm.generation' has no attribute 'nothing'"):
        generation.nothing  # noqa: B018


@pytest.mark.parametrize("name", LAZY)
def test_no_export_has_the_name_of_a_module(name):
    """Importing that module would hide the export."""
    exports = import_module(f"mlxlm.{name}").__all__
    assert exports and not {path.stem for path in (PACKAGE / name).iterdir()} & set(exports)
