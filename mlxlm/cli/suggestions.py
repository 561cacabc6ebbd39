"""What to try for a mistyped command or option, or one of another program."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches

import click

# Commands of mlx_lm, llama.cpp, ollama, litgpt and git, and ours.
_FOREIGN_COMMANDS = {
    "run": "chat",
    "repl": "chat",
    "complete": "generate",
    "server": "serve",
    "list": "models list",
    "ls": "models list",
    "pull": "models pull",
    "download": "models pull",
    "rm": "models rm",
    "remove": "models rm",
    "train": "pretrain, or finetune",
    "lora": "finetune",
    "sft": "finetune",
    "eval": "evaluate",
    "perplexity": "evaluate",
    "tokenize": "tokenizer encode",
    "detokenize": "tokenizer decode",
    "show": "inspect",
    "info": "inspect",
    "fuse": "convert",
    "bench": "kernels bench",
    "benchmark": "kernels bench",
    "version": "--version",
    "help": "--help",
}

# Our options, or arguments, and what mlx_lm, llama.cpp, ollama, litgpt and transformers call them. A name may stand in
# several lines: the command decides.
_FOREIGN_OPTIONS = {
    "MODEL": "-m --model --model-path --model-name-or-path --checkpoint-dir --hf-path --hf-repo",
    "SOURCE": "-m --model --model-path --checkpoint-dir --hf-path",
    "DATA": "--data --train-data --dataset --train-file",
    "--adapter": "--adapter-path --lora --lora-path",
    "--out": "-o --output --output-dir --out-dir --outfile --mlx-path --save-path --model-dir",
    "--prompt": "--message --text",
    "--system-prompt": "-s --system --sys",
    "--max-tokens": "--n-predict --predict --num-predict --max-new-tokens --max-length --max-gen-toks",
    "--temperature": "--temperature-sampling",
    "--typical-p": "--typical",
    "--repetition-penalty": "--repeat-penalty",
    "--repetition-context-size": "--repeat-last-n",
    "--json-schema": "-j --format --schema --json-schema-file",
    "--grammar": "--grammar-file",
    "--max-kv-size": "-c --ctx --ctx-size --context --context-length --context-size --num-ctx --n-ctx --max-model-len",
    "--max-seq-length": "-c --ctx --ctx-size --context --context-length --block-size --seq-len --seq-length",
    "--context-length": "-c --ctx --ctx-size --context --max-seq-length --seq-len --max-length",
    "--kv-bits": "--cache-type-k --cache-type-v --kv-cache-dtype",
    "--kv-keep": "--keep --num-keep",
    "--draft-model": "--model-draft --speculative-model",
    "--batch-size": "-b --micro-batch-size --per-device-train-batch-size --train-batch-size --parallel --bs",
    "--num-samples": "--num-return-sequences --num-sequences -N",
    "--learning-rate": "--lr --max-lr --train-lr",
    "--min-lr-ratio": "--min-lr",
    "--warmup-steps": "--warmup --warmup-iters --lr-warmup-steps",
    "--weight-decay": "--wd",
    "--grad-clip": "--max-norm --max-grad-norm --clip-grad --grad-clip-norm",
    "--grad-accumulation-steps": "--gradient-accumulation-steps --grad-accum --accumulate",
    "--grad-checkpoint": "--gradient-checkpointing --grad-checkpointing",
    "--steps": "--iters --max-steps --max-iters --num-iters --num-steps",
    "--epochs": "--num-epochs --num-train-epochs",
    "--eval-every": "--steps-per-eval --eval-steps --eval-interval",
    "--save-every": "--save-steps --save-interval",
    "--validation": "--val-data --valid --eval-data --test-data",
    "--resume": "--resume-from-checkpoint --resume-adapter-file --continue",
    "--tokenizer": "--tokenizer-dir --tokenizer-path --tokenizer-model",
    "--dtype": "--outtype --precision --torch-dtype",
    "--bits": "--q-bits --num-bits --load-in-4bit --ftype",
    "--group-size": "--q-group-size",
    "--mode": "--q-mode",
    "--recipe": "--quant-predicate",
    "--calibration-text": "--calibration --imatrix",
    "--eval-text": "--text",
    "--offline": "--local-files-only",
    "--cors-origin": "--allowed-origins --cors",
    "--log-level": "--log-verbosity --verbosity --log",
}


_BITS = re.compile(r"(load-in-|i?q|int|nf|fp)?(?P<bits>[2-8])([-_]?bits?|_\w+)?", re.IGNORECASE)  # q4_k_m, 4bit, int8


def suggest_command(name: str, group: str, commands: Collection[str]) -> str | None:
    """What to try instead of a command that doesn't exist.

    Args:
        name: What was typed.
        group: How the group is called: "mlxlm", or "mlxlm models".
        commands: Those of the group.
    """
    ours = {command: f"{group} {command}" for command in commands}
    known = ours if " " in group else {f: f"mlxlm {command}" for f, command in _FOREIGN_COMMANDS.items()} | ours
    matches = get_close_matches(name.lower(), known, n=2)
    if name.lower() in matches:
        matches = [name.lower()]
    return " or ".join(dict.fromkeys(known[match] for match in matches)) or None


def suggest_option(name: str, command: click.Command) -> str | None:
    """What to try instead of an option that this command doesn't have."""
    name = name if len(name) == 2 else name.lower().replace("_", "-")  # litgpt has underscores; -N is not -n
    ours = _names(command)
    if name in ours:
        return name
    if match := _BITS.fullmatch(name.lstrip("-")):  # --q4, --4bit
        bits = match["bits"]
        return f"--bits {bits}" if "--bits" in ours else f"mlxlm quantize --bits {bits}" if "--dtype" in ours else None
    called = [known for known, foreign in _FOREIGN_OPTIONS.items() if name in foreign.split() and known in ours]
    without_dashes = {option.lstrip("-").lower(): longest for option, longest in ours.items()}
    close = get_close_matches(name.lstrip("-"), without_dashes, n=2, cutoff=0.7)
    matches = called or [without_dashes[match] for match in close]
    return " or ".join(dict.fromkeys(matches)) or None


def suggest_bits(message: str, option: click.Option) -> str | None:
    """What to try if the choice that `message` quotes names a quantization of llama.cpp or another program: q4_k_m."""
    choices = list(map(str, option.type.choices)) if isinstance(option.type, click.Choice) else []
    match = re.search(r"'([^']+)' is not", message)
    bits = _BITS.fullmatch(match[1]) if match else None
    if bits is None:
        return None
    if bits["bits"] in choices:
        return f"{option.opts[0]} {bits['bits']}"
    if "float16" not in choices and "f16" not in choices:
        return None
    files = [choice for choice in choices if choice.startswith("q")]
    return " or ".join([*files, f"mlxlm quantize --bits {bits['bits']}"])


def missing_value(name: str, command: click.Command) -> tuple[str, str | None]:
    """The message for an option at the end of the line, which needs a value, and what to try."""
    option = next(p for p in command.params if name in p.opts)
    metavar = option.make_metavar(click.Context(command))
    return f"{name} needs a value", f"{name} {metavar}"


def _names(command: click.Command) -> dict[str, str]:
    """The names of options that aren't hidden, each with the longest of the same option, and those of arguments."""
    names = {}
    for parameter in command.params:
        if not isinstance(parameter, click.Option):
            name = re.sub(r"\W", "", parameter.human_readable_name)  # [FILE]...
            names[name] = name
        elif not parameter.hidden:
            names |= dict.fromkeys(parameter.opts, max(parameter.opts, key=len))
            names |= {name: name for name in parameter.secondary_opts}
    return names
