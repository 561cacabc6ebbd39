"""`mlxlm finetune`: train a model on conversations, or continue a run that does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mlxlm import train
from mlxlm.cli import render, training_options
from mlxlm.cli.options import (
    MODEL,
    SectionedCommand,
    data_option,
    field_option,
    given_values,
    offline_option,
    option,
)
from mlxlm.cli.run_options import (
    given_budget,
    pop_runtime_options,
    require_arguments,
    resumed_run,
    run_options,
    runtime_options,
)
from mlxlm.cli.training import phase, run_and_summarize
from mlxlm.config.option import options_of
from mlxlm.data.options import DataOptions
from mlxlm.train.settings import TrainSettings

# Samples of text would show no conversation, and fine-tuning has its own packing.
_UNUSED_SETTINGS = ("packing", "document_mask", "sample_every", "sample_prompt", "sample_tokens")
_SHORT_CONTEXT = 1024  # tokens: a chat fills it soon
_HELP_TEXTS = {
    "batch_size": "Rows per forward pass.  [default: 16, fewer for few conversations]",
    "max_seq_length": "Tokens per row.  [default: the model's context, at most 512]",
    "learning_rate": "Peak learning rate.  [default: by model size: a fifth of pretrain's, with --loss less]",
    "eval_every": "Steps between validations; 0: only at the end.  [default: a tenth of all steps]",
    "seed": "Random seed of data order and dropout.  [default: 0]",
}


_PREFERENCE_SETTINGS = {name: options_of(TrainSettings)[name] for name in ("loss", "beta")}


@click.command(cls=SectionedCommand)
@click.argument("model", required=False, type=MODEL)
@offline_option
@click.argument("data", nargs=-1)
@run_options
@training_options.steps_option
@option("Training length", "--epochs", float, "Number of passes over DATA.  [default: 3; with --loss dpo or kto 1]")
@option("Training length", "--minutes", float, "Time limit.")
@option(
    "Data",
    "--chat-template",
    str,
    "Chat template, if the model has none; see mlxlm chat.",
    metavar="NAME|FILE",
    advanced=True,
)
@training_options.validation_options("Conversations for validation, instead of a part of DATA.")
@data_option("on_bad_input", "Data")
@field_option(_PREFERENCE_SETTINGS["loss"], section="Preferences", common=True)
@field_option(_PREFERENCE_SETTINGS["beta"], section="Preferences")
@training_options.setting_options(_UNUSED_SETTINGS, _HELP_TEXTS)
@training_options.quantize_bits_option
@runtime_options
def finetune(model: str | None, data: tuple[str, ...], **options: Any) -> None:
    """Fine-tune MODEL on DATA, conversations in .jsonl, .json, .csv or .parquet files.

    MODEL is a name of mlxlm models, a run, a folder, a .gguf file or a hub id. A line of DATA (here wrapped) is

    \b
    {"messages": [{"role": "user", "content": "What is 2 + 2?"},
                  {"role": "assistant", "content": "4"}]}

    or {"prompt": ..., "completion": ...}, or Alpaca's {"instruction": ..., "input": ..., "output": ...}. With --loss it
    is a preference: {"prompt": ..., "chosen": ..., "rejected": ...}, or for KTO also {"prompt": ..., "completion": ...,
    "label": true}. A prompt or an answer is a text, or a list of messages.

    All parameters are trained, with the loss on the assistant's messages only. Chat with the result: mlxlm chat RUN.
    The first Ctrl-C finishes the step, saves, and prints the command that continues.
    \f

    A conversation that fits in a row is never split. Longer ones are split before questions. An answer that is longer
    than a row continues in the next one, after half a row of its context.

    A chat template that rewrites answers, such as those of reasoning models with <think>, needs answers without it. The
    context of a chat is that of MODEL.
    """  # noqa: D301 - \b keeps click from wrapping the example, and --help ends at \f
    runtime = pop_runtime_options(options)
    run = resumed_run((model, data), options)
    if run is None:
        run = _new_run(model, data, options.pop("out"), options, runtime["power"].duty_cycle)
    run_and_summarize(run, resume=True, **runtime)
    context = run.config.max_position_embeddings
    if context <= _SHORT_CONTEXT:
        hint = "mlxlm chat --context-overflow drop continues a chat beyond them"
        render.say(f"the context of this model is {context} tokens: {hint}")


def _new_run(
    model: str | None, data: tuple[str, ...], out: Path | None, options: dict[str, Any], duty_cycle: float
) -> train.Run:
    from mlxlm.chat.sft_encoder import SFTEncoder

    if model is not None and not data and Path(model).suffix in (".jsonl", ".json", ".csv", ".parquet"):
        data, model = (model,), None
    usage = "mlxlm finetune MODEL DATA --out RUN, or --resume RUN"
    require_arguments(usage, {"MODEL": model, "DATA": data, "--out": out})
    assert model is not None and out is not None  # for type checkers
    training_options.reject_unused_settings(
        options, (), (options["loss"] in (None, "cross_entropy"), ["beta"], "only --loss dpo, orpo and kto have it")
    )
    base, tokenizer = train.open_base_model(model)
    eos_ids = base.config.eos_token_ids | (frozenset() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id})
    encoder = SFTEncoder(tokenizer, eos_ids, options["chat_template"])
    conversations = DataOptions(data, stdin=sys.stdin.buffer, **training_options.data_settings(options))
    budget = given_budget(options, duty_cycle=duty_cycle)
    preferences = given_values({name: options[name] for name in _PREFERENCE_SETTINGS})
    settings = {**training_options.given_settings(options), **preferences}
    run = train.start_finetune(
        out, base, tokenizer, encoder, conversations, budget=budget, settings=settings, phase=phase
    )
    training_options.print_skipped(run.data)
    return run
