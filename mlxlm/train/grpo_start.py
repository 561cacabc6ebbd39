"""From a model, prompts and a reward function to a run that trains the model with GRPO."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxlm.chat.chat_encoder import chat_encoder
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.checkpoint import Checkpoint
from mlxlm.data import DataOptions
from mlxlm.data.prompts import split_prompts, write_prompts
from mlxlm.generation import LoadedModel
from mlxlm.model import Decoder
from mlxlm.tokenizer import Tokenizer
from mlxlm.train.base_model import create_from_base
from mlxlm.train.budget import Budget
from mlxlm.train.events import Prompts
from mlxlm.train.grpo import RewardFunction, Rewards, prompt_encoder
from mlxlm.train.memory_limits import check_memory
from mlxlm.train.optimizers import default_learning_rate
from mlxlm.train.run import Run
from mlxlm.train.settings import GRPOOptions, TrainSettings
from mlxlm.train.start import Phase, as_data_options, merge_budget, no_phase
from mlxlm.utils.errors import CheckpointError, DataError
from mlxlm.utils.files import check_not_exists, working_folder

# Samples have no dropout, and a loss that is no measure of progress has no spikes.
GRPO_SETTINGS = {"dropout": 0.0, "spike_threshold": 0.0}  # of every run
_GROUPS_PER_STEP = 8
_LR_FRACTION = 0.01  # of the peak rate of pretraining: 1.2e-6 for 7B parameters, where TRL has 1e-6


def start_grpo(
    out: Path | str,
    base: Checkpoint,
    tokenizer: Tokenizer,
    data: DataOptions | Sequence[str | Path],
    reward: RewardFunction,
    *,
    options: GRPOOptions | None = None,
    chat_template: str | None = None,
    budget: Budget | None = None,
    settings: Mapping[str, Any] | None = None,
    phase: Phase = no_phase,
) -> Run:
    """Make the run directory `out`, ready for `train(run, tokenizer, reward=reward, resume=True)`.

    The run begins with a checkpoint of step 0, the model in float32, and has the sampling options of its
    generation_config.json, which sampling in training doesn't use.

    Args:
        out: The new folder.
        base: The model, of `open_base_model`.
        tokenizer: Its tokenizer, of `open_base_model`.
        data: Paths of prompts as JSON lines, see `read_prompts`; or DataOptions, for what is held out.
        reward: The reward function, see `Rewards`.
        options: How answers are sampled and learned from.
        chat_template: See `mlxlm.chat.chat_encoder.chat_encoder`.
        budget: How many steps or epochs to train, unless `settings` have "steps". Default: 1 epoch.
        settings: Fields of `TrainSettings`, except those of GRPO_SETTINGS. A batch has 8 groups by default. The
            learning rate defaults to a hundredth of that of pretraining, weight decay to 0, validation to 10 times.
        phase: See `start_run`.

    Raises:
        CheckpointError: `out` exists.
        DataError, ConfigError, TokenizerError: For what can't work.
    """
    out, options = Path(out), options or GRPOOptions()
    check_not_exists(out, CheckpointError, f"mlxlm grpo --resume {shlex.quote(str(out))}, or another `out`")
    budget, values = merge_budget(budget, None, {**(settings or {}), **GRPO_SETTINGS, "grpo": options})
    values.setdefault("batch_size", _GROUPS_PER_STEP * options.num_generations)
    values.setdefault("weight_decay", 0.0)
    config = base.config.with_changes(quantization=None)
    peak = default_learning_rate(config, values.get("optimizer", TrainSettings.optimizer))
    values.setdefault("learning_rate", _LR_FRACTION * peak)
    draft = TrainSettings.provisional(values)
    splits = split_prompts(as_data_options(data), draft.seed)
    prompts = [*splits["train"], *splits["validation"]]
    Rewards(reward).check(prompts)
    encoder = chat_encoder(tokenizer, config.eos_token_ids, chat_template)
    tokenizer.chat_template = encoder.source if isinstance(encoder, ChatTemplate) else None
    encode, longest = prompt_encoder(LoadedModel(Decoder(config), tokenizer, config, base.path)), 0
    with phase("reading the prompts", None):
        for prompt in prompts:
            length = len(encode(prompt).ids)
            if (room := config.max_position_embeddings - length) < options.max_tokens:
                problem = f"{prompt.location} has {length} tokens, which leave {max(0, room)} for an answer"
                raise DataError(problem, f"`max_tokens={room}` or less" if room > 0 else "a shorter prompt")
            longest = max(longest, length)
    values["max_seq_length"] = longest + options.max_tokens - 1
    if budget.steps is None:
        groups = draft.rows_per_step // options.num_generations
        values["steps"] = max(1, math.ceil((budget.epochs or 1.0) * len(splits["train"]) / groups))
    values.setdefault("eval_every", max(1, values["steps"] // 10))
    final = TrainSettings(**values)
    check_memory(config, final, preset="")
    with working_folder(out) as workspace:
        folder = workspace / "data"
        folder.mkdir()
        write_prompts(folder, splits)
        event = Prompts(len(splits["train"]), len(splits["validation"]), longest)
        return create_from_base(out, base, config, final, tokenizer, folder, True, event)
