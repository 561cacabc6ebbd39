"""The lines before the first message."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlxlm.backend import bandwidth
from mlxlm.chat.files import TextFile
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal import about
from mlxlm.chat.terminal.about import example_prompt, first_screen, model_name
from mlxlm.chat.terminal.autosave import Autosave
from mlxlm.chat.terminal.repl import Repl
from mlxlm.chat.terminal.settings import Settings
from mlxlm.checkpoint.mlx_lm import MlxLmConfig
from mlxlm.generation import GenerationConfig


def test_lines_of_a_small_model(lm, tmp_path):
    name, size, *_, commands = first_screen(Chat(lm))
    assert name == tmp_path.name and "/help lists the commands" in commands
    assert size.endswith(f" parameters, {lm.weight_bytes / 1e3:.3g} kB of memory, a context of 4,096 tokens")
    other = replace(lm, config=MlxLmConfig("x", 300, 4096, frozenset()))
    assert first_screen(Chat(other))[1] == f"{lm.weight_bytes / 1e3:.3g} kB of memory, a context of 4,096 tokens"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert "Continuing after 2 messages" in first_screen(Chat(lm, system_prompt="Short.", messages=messages))[2]
    assert "by at most 256 tokens" in first_screen(Chat(lm, chat_template="plain"))[2]


@pytest.mark.parametrize(("weights", "line"), [(100_000_000, "at most 250 tokens/s"), (99_999_999, ""), (None, "")])
def test_the_speed_is_estimated_unless_weights_fit_into_caches(lm, monkeypatch, weights, line):
    monkeypatch.setattr(bandwidth, "weight_bytes", lambda model: weights)
    monkeypatch.setattr(about, "memory_bandwidth", lambda: 2.52e10)
    lines = [text for text in first_screen(Chat(lm)) if "tokens/s" in text]
    assert [line] == [text.removeprefix("Estimate: ").removesuffix(" on this machine") for text in lines] or not line
    assert bool(lines) == bool(line)


def test_examples_suit_the_model(lm):
    assert example_prompt(Chat(lm)) == "Why is the sky blue?"
    assert example_prompt(Chat(lm, chat_template="plain")) == "Once upon a time"
    own = replace(lm, generation_config=GenerationConfig(example_prompt="What is assert?"))
    assert example_prompt(Chat(own)) == "What is assert?"
    repl = Repl(Chat(lm), Settings(), Autosave(), None, {}, interactive=True)
    assert repl.example()
    repl.files = [TextFile("notes.txt", "Some notes.")]
    assert not repl.example()


@pytest.mark.parametrize(
    ("path", "name"), [("a/tiny", "tiny"), ("a/Some-4B.Q4_1.gguf", "Some-4B.Q4_1"), ("run/4bit", "run/4bit")]
)
def test_names_are_short(lm, tmp_path, path, name):
    (tmp_path / path).mkdir(parents=True)
    assert model_name(replace(lm, path=tmp_path / path)) == name
    assert model_name(replace(lm, path=Path("org/name"))) == "org/name"
