"""`mlxlm compare-architectures`: train variants of a model on the same data and budget, and draw their curves."""

from __future__ import annotations

from typing import Any

import click

from mlxlm.cli import training_options
from mlxlm.cli.options import SectionedCommand, json_option, option
from mlxlm.cli.run_options import runtime_options, sweep_options
from mlxlm.cli.sweep import run_sweep

_VARIANT = (
    'A variant: "wide: hidden_size=256", "positions=alibi", alibi, swiglu, or base for no change. Settings such as '
    "dropout and learning_rate work too. Give two or more."
)
_TOKENS = "Number of tokens, such as 2e6.  [default: 20 per parameter of the first variant]"
_MINUTES = "Minutes per variant on average; all get as many tokens."


@click.command("compare-architectures", cls=SectionedCommand)
@click.argument("data", nargs=-1)
@sweep_options("Comparison")
@option("Comparison", "--variant variants", str, _VARIANT, multiple=True, metavar="NAME: PART=VALUE, ...")
@training_options.model_options("Comparison", "Base model of the variants; see mlxlm models presets.  [default: 1m]")
@option("Training length", "--steps", int, "Number of steps of each variant.")
@option("Training length", "--tokens", float, _TOKENS)
@option("Training length", "--minutes", float, _MINUTES)
@training_options.data_options()
@training_options.setting_options(training_options.DISTILLATION)
@runtime_options
@json_option
def compare_architectures(data: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Train variants of a model on DATA, and plot their loss curves together.

    All variants share one tokenizer and see the same tokens. Each is an ordinary run in its own folder. Ctrl-C finishes
    the step and saves; --resume FOLDER continues what is unfinished.
    """
    from mlxlm.experiments.sweep import Comparison, Halving
    from mlxlm.experiments.variant import Variant

    if options["minutes"] is not None:
        options["minutes"] *= len(options["variants"])

    variants = [Variant.parse(text) for text in options["variants"]]
    run_sweep(Comparison, data, options, variants, Halving(1, 1), as_json)
