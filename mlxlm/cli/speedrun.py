"""`mlxlm speedrun`: the best model of the built-in corpus in a fixed time, with a receipt that others can verify."""

from __future__ import annotations

import shlex
from typing import Any

import click

from mlxlm import train
from mlxlm.cli import render, training_options
from mlxlm.cli.options import SectionedCommand, field_option, given_values, option
from mlxlm.cli.render import spinner
from mlxlm.cli.run_options import (
    model_and_settings,
    override_option,
    pop_runtime_options,
    require_arguments,
    resumed_run,
    run_options,
    runtime_options,
)
from mlxlm.cli.training import phase, run_and_summarize
from mlxlm.config.option import options_of
from mlxlm.families import config_to_hf
from mlxlm.train.settings import TokenizerOptions
from mlxlm.utils.formatting import human_count

# Minutes, and bytes of the corpus as JSON lines; half of them is text. In an hour a GPU of 15 TFLOP/s, at a utilization
# of 0.3, trains its compute-optimal model on 230M tokens: four passes, after which repetition teaches less.
TRACKS = {"3": (3.0, 20_000_000), "10": (10.0, 60_000_000), "60": (60.0, 300_000_000)}
_SEED = 0  # of the corpus


@click.command(cls=SectionedCommand)
@run_options
@option("Run", "--track", list(TRACKS), "Minutes of training.", default="3")
@training_options.model_options("Model", "Model size; see mlxlm models presets.  [default: chosen for the time]")
@override_option
@training_options.setting_options(training_options.DISTILLATION)
@field_option(options_of(TokenizerOptions)["tokenizer_type"])
@field_option(options_of(TokenizerOptions)["vocab_size"], default="chosen for the time, or the preset's")
@runtime_options
def speedrun(track: str, **options: Any) -> None:
    """Train the best model that you can in 3, 10 or 60 minutes, and print its score.

    Everyone trains on the same built-in corpus of conversations, small-world. The score is the bits per byte of the
    answers in its held-out conversations: lower is better. The time begins after the corpus is written and tokenized.
    Without options, the model and its settings are those of mlxlm pretrain --minutes.

    RUN/receipt.json has all that anyone needs to train the same model again, with mlxlm models verify.
    """
    runtime = pop_runtime_options(options)
    run = resumed_run((), options | {"track": track})
    resume = run is not None
    if run is None:
        run = _new_run(track, options)
    from mlxlm.experiments.receipt import FILE_NAME, SCORE, Receipt, read_recipe
    from mlxlm.utils.json_files import write_json

    minutes = read_recipe(run)[0].minutes
    run_and_summarize(run, resume=resume, **runtime)
    path = run.path / FILE_NAME
    if not path.exists():
        with spinner("predicting the held-out answers"):
            write_json(path, Receipt.of_run(run).to_dict())
    receipt = Receipt.read(path).to_dict()
    results, machine = receipt["results"], receipt["results"]["environment"]
    limit = "no time limit" if minutes is None else f"{minutes:g} min"
    render.result(
        f"mlxlm speedrun, {limit}: {results[SCORE]:.4f} bits per byte; {human_count(run.config.parameter_count())} "
        f"parameters, {results['steps']:,} steps of {run.settings.tokens_per_step:,} tokens; {machine['chip']}, "
        f"{machine['cores']} cores, {machine['device']}; mlxlm {machine['mlxlm']} ({machine['source']}); "
        f"receipt {receipt['sha256'][:12]}"
    )
    render.say(f"Publish {path} with this line. To verify it, train the same model again:")
    render.say(f"mlxlm models verify {shlex.quote(str(path))} --all")


def _new_run(track: str, options: dict[str, Any]) -> train.Run:
    from mlxlm.experiments.receipt import TOKENIZER_FIELDS, Recipe
    from mlxlm.train.start import DEVICE_DTYPE

    out = options.pop("out")
    require_arguments("mlxlm speedrun --out RUN, or --resume RUN", {"--out": out})
    training_options.reject_unused_settings(options, ())
    config, settings = model_and_settings(options, has_time_limit=True)
    minutes, num_bytes = TRACKS[track]
    settings.setdefault("dtype", DEVICE_DTYPE)
    tokenizer = given_values({name: options[name] for name in TOKENIZER_FIELDS})
    model = None if config is None else config_to_hf(config)
    return Recipe(num_bytes, _SEED, model, settings, tokenizer, minutes).start(out, phase)
