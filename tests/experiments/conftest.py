"""Experiments share the fixtures of training runs."""

from tests.train.conftest import new_run, tokenizer_folder  # noqa: F401
