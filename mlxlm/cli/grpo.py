"""`mlxlm grpo`: train a model with a reward function, or continue a run that does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import click

from mlxlm import train
from mlxlm.cli import training_options
from mlxlm.cli.options import MODEL, SectionedCommand, add_options, field_option, given_values, offline_option, option
from mlxlm.cli.run_options import (
    pop_runtime_options,
    require_arguments,
    resumed_run,
    run_options,
    runtime_options,
)
from mlxlm.cli.training import phase, run_and_summarize
from mlxlm.config.option import options_of
from mlxlm.data.options import DataOptions
from mlxlm.train.settings import GRPOOptions
from mlxlm.utils.errors import ConfigError

_REWARD = "Python file with the reward function, by default named reward. It is executed."
# A row is a prompt with its answer, and validation is the mean reward.
_UNUSED_SETTINGS = (
    "packing", "document_mask", "max_seq_length", "dropout", "spike_threshold", "eval_tokens", "sample_every",
    "sample_prompt", "sample_tokens",
)  # fmt: skip
_HELP_TEXTS = {
    "batch_size": "Answers per forward pass.  [default: 8 groups]",
    "learning_rate": "Peak learning rate.  [default: a hundredth of pretrain's, which depends on the model size]",
    "weight_decay": "Decoupled weight decay of matrices.  [default: 0]",
    "eval_every": "Steps between validations; 0: only at the end.  [default: a tenth of all steps]",
    "seed": "Random seed of the order of prompts and of the answers.  [default: 0]",
}


@click.command(cls=SectionedCommand)
@click.argument("model", required=False, type=MODEL)
@offline_option
@click.argument("prompts", nargs=-1)
@run_options
@option("Answers and rewards", "--reward", str, _REWARD, metavar="FILE.py[:NAME]")
@add_options(*(field_option(field) for field in options_of(GRPOOptions).values()))
@training_options.steps_option
@option("Training length", "--epochs", float, "Number of passes over the prompts.  [default: 1]")
@training_options.chat_template_option
@training_options.validation_options("Prompts for validation, instead of a part of PROMPTS.")
@training_options.setting_options(_UNUSED_SETTINGS, _HELP_TEXTS)
@runtime_options
def grpo(model: str | None, prompts: tuple[str, ...], reward: str | None, **options: Any) -> None:
    """Train MODEL with GRPO: with a function that rewards its answers to PROMPTS.

    MODEL is a name of mlxlm models, a run, a folder, a .gguf file or a hub id. A line of PROMPTS is

    \b
    {"prompt": "What is 2 + 2?", "answer": "4"}

    The prompt is a text or a list of messages, and there can be any other fields. A reward function for it, in FILE.py:

    \b
    def reward(prompt, completion, answer):
        return float(completion.endswith(answer))

    It gets the prompt, the completion that the model has generated, and those of the other fields that it has
    parameters for, and returns a number. Each step generates a group of answers to each of some prompts, and makes the
    better ones of each group more likely.

    The first Ctrl-C finishes the step, saves, and prints the command that continues.
    \f

    A text is a user's message, unless the model has no chat template: then it is continued. With --resume, the reward
    function is given again, because a run has no code.
    """  # noqa: D301 - \b keeps click from wrapping the example, and --help ends at \f
    runtime = pop_runtime_options(options)
    usage = "mlxlm grpo MODEL PROMPTS --reward FILE.py --out RUN, or --resume RUN --reward FILE.py"
    require_arguments(usage, {"--reward": reward})
    assert reward is not None  # for type checkers
    function = load_reward_function(reward)
    run = resumed_run((model, prompts), options)
    if run is None:
        require_arguments(usage, {"MODEL": model, "PROMPTS": prompts, "--out": options["out"]})
        assert model is not None
        run = _new_run(model, prompts, reward, function, options)
    run_and_summarize(run, resume=True, reward=function, **runtime)


def _new_run(
    model: str, prompts: tuple[str, ...], reward: str, function: train.RewardFunction, options: dict[str, Any]
) -> train.Run:
    training_options.reject_unused_settings(options, ())
    data = DataOptions(prompts, **training_options.data_settings(options))
    grpo_options = given_values({name: options[name] for name in options_of(GRPOOptions)})
    base, tokenizer = train.open_base_model(model)
    return train.start_grpo(
        options["out"], base, tokenizer, data, function,
        options=GRPOOptions(**grpo_options, reward=reward),
        chat_template=options["chat_template"],
        budget=train.Budget(epochs=options["epochs"]),
        settings=training_options.given_settings(options),
        phase=phase,
    )  # fmt: skip


def load_reward_function(source: str) -> train.RewardFunction:
    """Execute a Python file, and return a function of it.

    Args:
        source: FILE.py, whose function is called reward, or FILE.py:NAME.

    Raises:
        ConfigError: The file is missing or fails, or has no such function.
    """
    file, colon, name = source.rpartition(":")
    path, name = (Path(file), name) if colon and name.isidentifier() else (Path(source), "reward")
    if not path.is_file():
        raise ConfigError(f"there is no file {path} with a reward function", "--reward FILE.py")
    sys.path.insert(0, str(path.parent.resolve()))  # as for a program, so that it can import its neighbors
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file", "a name that ends with .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{path} failed: {type(error).__name__}: {error}", "--debug, which prints where") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = f"--reward {path}:{names[0]}" if names else "def reward(prompt, completion): ..."
        raise ConfigError(f"{path} has no function {name}", hint)
    return function
