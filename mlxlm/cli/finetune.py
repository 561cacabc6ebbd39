"""`mlxlm finetune`: train a model on conversations, or continue a run that does."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.text import Text

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
from mlxlm.data import Chunk, Document
from mlxlm.data.options import DataOptions
from mlxlm.data.pairs import REJECTED
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.settings import TrainSettings
from mlxlm.utils.formatting import printable

# Samples of text would show no conversation, and fine-tuning has its own packing.
_UNUSED_SETTINGS = (
    *("packing", "document_mask", "sample_every", "sample_prompt", "sample_tokens"),
    "parametrization",
)
_SHORT_CONTEXT = 1024  # tokens: a chat fills it soon
_SHOW = "Print N rows with what is learned, and exit."
_STYLES = {True: ("black on green", "black on bright_green"), False: ("default", "dim")}  # of tokens, in turn
_HELP_TEXTS = {
    "batch_size": "Rows per forward pass.  [default: 16, fewer for few conversations]",
    "max_seq_length": "Tokens per row.  [default: the model's context, at most 512]",
    "learning_rate": "Peak learning rate.  [default: by model size]",
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
@option("Training length", "--epochs", float, "Number of passes over DATA.  [default: 3; dpo, kto: 1]")
@option("Training length", "--minutes", float, "Time limit.")
@training_options.chat_template_option
@training_options.validation_options("Conversations for validation, instead of a part of DATA.")
@data_option("text_column", "Data")
@data_option("on_bad_input", "Data")
@option("Data", "--show", click.IntRange(1), _SHOW)
@field_option(_PREFERENCE_SETTINGS["loss"], section="Preferences", common=True)
@field_option(_PREFERENCE_SETTINGS["beta"], section="Preferences")
@training_options.setting_options(_UNUSED_SETTINGS, _HELP_TEXTS)
@training_options.quantize_bits_option
@runtime_options
def finetune(model: str | None, data: tuple[str, ...], **options: Any) -> None:
    """Fine-tune MODEL on DATA: conversations in .jsonl, .json, .csv or .parquet files, or hf://datasets/OWNER/NAME.

    MODEL is a name of mlxlm models, a run, a folder, a .gguf file or a hub id. A line of DATA (here wrapped) is

    \b
    {"messages": [{"role": "user", "content": "What is 2 + 2?"},
                  {"role": "assistant", "content": "4"}]}

    or {"prompt": ..., "completion": ...}, or a line of Alpaca's, ShareGPT's or another format of the documentation;
    with --loss, {"prompt": ..., "chosen": ..., "rejected": ...}.

    All parameters are trained, with the loss on the assistant's messages only. Ctrl-C finishes the step, saves, and
    prints the command that continues.
    \f

    With --loss kto, a line can also be {"prompt": ..., "completion": ..., "label": true}. A prompt or an answer is a
    text, or a list of messages.

    A conversation that fits in a row is never split. Longer ones are split before questions. An answer that is longer
    than a row continues in the next one, after half a row of its context.

    A chat template that rewrites answers, such as those of reasoning models with <think>, needs answers without it. The
    context of a chat is that of MODEL.
    """  # noqa: D301 - \b keeps click from wrapping the example, and --help ends at \f
    runtime = pop_runtime_options(options)
    run = resumed_run((model, data), options)
    if run is None:
        run = _new_run(model, data, options.pop("out"), options, runtime["power"].duty_cycle)
    if run is None:
        return
    run_and_summarize(run, resume=True, **runtime)
    context = run.config.max_position_embeddings
    if context <= _SHORT_CONTEXT:
        hint = "mlxlm chat --context-overflow drop continues a chat beyond them"
        render.say(f"the context of this model is {context} tokens: {hint}")


def _new_run(
    model: str | None, data: tuple[str, ...], out: Path | None, options: dict[str, Any], duty_cycle: float
) -> train.Run | None:
    """Make the run, or print rows for `--show` and return None."""
    from mlxlm.chat.sft_encoder import SFTEncoder

    show = options.pop("show")
    if model is not None and not data and Path(model).suffix in (".jsonl", ".json", ".csv", ".parquet"):
        data, model = (model,), None
    usage = "mlxlm finetune MODEL DATA --out RUN, or --resume RUN"
    require_arguments(usage, {"MODEL": model, "DATA": data, "--out": out or show})
    assert model is not None  # for type checkers
    training_options.reject_unused_settings(
        options, (), (options["loss"] in (None, "cross_entropy"), ["beta"], "only --loss dpo, orpo and kto have it")
    )
    base, tokenizer = train.open_base_model(model)
    eos_ids = base.config.eos_token_ids | (frozenset() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id})
    encoder = SFTEncoder(tokenizer, eos_ids, options["chat_template"])
    conversations = DataOptions(data, stdin=sys.stdin.buffer, **training_options.data_settings(options))
    preferences = given_values({name: options[name] for name in _PREFERENCE_SETTINGS})
    settings = {**training_options.given_settings(options), **preferences}
    if show is not None:
        _print_rows(train.first_rows(base, encoder, conversations, show, settings), tokenizer)
        return None
    assert out is not None
    budget = given_budget(options, duty_cycle=duty_cycle)
    run = train.start_finetune(
        out, base, tokenizer, encoder, conversations, budget=budget, settings=settings, phase=phase
    )
    training_options.print_read(run.data)
    if encoder.has_tools_as_text:
        problem = "the chat template has no format for tools: they are text, and calls are between <tool_call> tags"
        render.say(f"{problem}, as mlxlm chat and mlxlm serve read them", style="yellow")
    return run


def _print_rows(rows: Iterable[tuple[Document, Chunk]], tokenizer: Tokenizer) -> None:
    """Print documents on stdout token by token: learned tokens in another color or, without color, in brackets."""
    console = render.stdout_console()
    in_color = console.color_system is not None and not console.no_color
    for document, chunk in rows:
        loss_mask = [False] * len(chunk.ids) if chunk.loss_mask is None else chunk.loss_mask.astype(bool).tolist()
        text = Text()
        for n, (id, is_learned) in enumerate(zip(chunk.ids.tolist(), loss_mask, strict=True)):
            token = tokenizer.token_bytes(id, skip_special_tokens=False).decode("utf-8", "backslashreplace")
            shown = printable(token.replace("\n", "\\n"))
            if in_color:
                text.append(shown, _STYLES[is_learned][n % 2])
            elif is_learned:
                text.append(f"[{shown}]")
            else:
                text.append(f"·{shown}" if n and not loss_mask[n - 1] else shown)
            if token.endswith("\n"):
                text.append("\n")
        is_rejected = chunk.loss_mask is not None and chunk.loss_mask.max() == REJECTED
        counts = f"{len(chunk.ids)} tokens, {sum(loss_mask)} {'of the rejected answer' if is_rejected else 'learned'}"
        heading = Text(printable(f"{document.location} ({document.format}): {counts}"), "bold")
        console.print(heading, text, "", sep="\n", soft_wrap=True)
    if in_color:
        console.print(Text.assemble(("learned", _STYLES[True][0]), " ", ("context", _STYLES[False][0])))
    else:
        console.print(Text("[learned] tokens are in brackets, the others are context, separated by ·"))
