"""Tokenizers by the name of a model."""

import pytest

from mlxlm.checkpoint import open_checkpoint, open_tokenizer
from mlxlm.train.start import TokenizerOptions, existing_tokenizer
from mlxlm.utils.errors import TokenizerError


def test_a_name_is_a_model_unless_a_path_has_it(tiny_tokenizer, tmp_path, monkeypatch):
    bundled = open_checkpoint("small-world").load_tokenizer().fingerprint
    assert open_tokenizer("small-world").fingerprint == bundled
    assert existing_tokenizer(TokenizerOptions("small-world"), None).fingerprint == bundled
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer.save(tmp_path / "small-world")
    assert open_tokenizer("small-world").fingerprint == tiny_tokenizer.fingerprint != bundled
    with pytest.raises(TokenizerError, match="other"):
        open_tokenizer("other")
