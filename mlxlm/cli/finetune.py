"""`mlxlm finetune`: tune a model on conversations, or continue doing so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli import render
from mlxlm.cli.machine_options import machine_options, pop_machine_options
from mlxlm.cli.run_options import (
    ON_BAD_INPUT,
    check_data_needs_resume,
    check_resume_alone,
    given_settings,
    moved_data_option,
    open_resumed_run,
    print_skipped,
    reject_unused_options,
    setting_options,
)

if TYPE_CHECKING:
    from mlxlm.train import Run

# What samples would show is no conversation; the form of the rows is that of all tuning.
_WITHOUT = ("packing", "document_mask", "sample_every", "sample_prompt", "sample_tokens")
_SHORT = 1024  # tokens of a context that a chat is soon at the end of
_TEXTS = {
    "batch_size": "Rows per forward pass (default: 16, fewer for few conversations).",
    "max_seq_length": "Tokens per row (default: the model's context, at most 512).",
    "learning_rate": "Peak learning rate (default: a fifth of pretraining's, by model size).",
    "eval_every": "Steps between validations; 0: at the end only (default: a tenth of all).",
    "seed": "Order of the data, dropout.",
}


@click.command()
@click.argument("model", required=False)
@click.argument("data", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="The run's new folder.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="RUN", help="Continue this run, as it began.")
@moved_data_option
@click.option("--chat-template", metavar="NAME|FILE", help="Chat template, for a model without one: see mlxlm chat.")
@click.option("--validation", multiple=True, help="Conversations for validation (default: a part of DATA).")
@click.option("--validation-fraction", type=float, help="Share of DATA held out.  [default: 0.05]")
@ON_BAD_INPUT
@click.option("--steps", type=int, help="How long to train, in steps,")
@click.option("--epochs", type=float, help="in passes over the conversations (default: 3),")
@click.option("--minutes", type=float, help="or in minutes.")
@setting_options(_WITHOUT, _TEXTS)
@machine_options
def finetune(model, data, out, resume, moved_data, **options: Any) -> None:
    """Tune MODEL (a run, a folder, a .gguf file or a hub id) on DATA: .jsonl files of conversations, such as

    \b
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

    All parameters are trained, on what the assistant says. The run is a model to chat with: mlxlm chat RUN.

    A conversation that fits a row is whole in one. Longer ones are cut in front of questions; an answer that is longer
    than a row goes on in the next one, after half a row of what came before, so that it is learned to its end.

    A template that rewrites answers, as those of reasoning models do with <think>, needs answers without it. A chat
    holds no more tokens than MODEL's context.

    The first Ctrl-C finishes the step, saves, and prints the command that continues.
    """
    start_time = click.get_current_context().meta["mlxlm.start_time"]
    from mlxlm.cli.training import print_summary, run_training
    from mlxlm.tokenizer import load

    going = pop_machine_options(options)
    if resume is not None:
        check_resume_alone(model, data, out, options=options)
        run = open_resumed_run(resume, moved_data)
    else:
        check_data_needs_resume(moved_data)
        run = _new_run(model, data, out, options, going["power"].duty_cycle, start_time)
    ending = run_training(run, load(run.path), resume=True, **going)
    print_summary(ending, run)
    if run.config.max_position_embeddings <= _SHORT:
        render.say(
            f"a chat with it holds {run.config.max_position_embeddings} tokens, its context: "
            "mlxlm chat --context-overflow drop goes on beyond them"
        )
    render.result(str(run.path))


def _new_run(
    model: str | None,
    data: tuple[str, ...],
    out: Path | None,
    options: dict[str, Any],
    duty_cycle: float,
    start_time: float,
) -> Run:
    from mlxlm.chat.sft_encoder import SFTEncoder
    from mlxlm.cli.training import phase
    from mlxlm.data import Manifest
    from mlxlm.train import open_base_model, start_finetune

    if model is None or not data or out is None:
        raise click.UsageError("give MODEL, DATA and --out RUN, or --resume RUN")
    reject_unused_options(
        options, (options["validation"], ["validation_fraction"], "--validation says what is held out")
    )
    base, tokenizer = open_base_model(model)
    given = {name: options[name] for name in ("validation_fraction", "on_bad_input") if options[name] is not None}
    run = start_finetune(
        out,
        base,
        tokenizer,
        SFTEncoder(tokenizer, base.config.eos_ids | {tokenizer.eos_id}, options["chat_template"]),
        data,
        validation=options["validation"],
        epochs=options["epochs"],
        minutes=options["minutes"],
        duty_cycle=duty_cycle,
        start_time=start_time,
        settings=given_settings(options),
        stdin=sys.stdin.buffer,
        phase=phase,
        **given,
    )
    print_skipped(Manifest.read(run.data).skipped)
    return run
