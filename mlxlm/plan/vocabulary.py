"""Which vocabulary size suits a text, a model and a training time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from mlxlm.data import DataOptions
from mlxlm.data.preparation import training_texts
from mlxlm.data.sources import unseekable_source
from mlxlm.plan.corpus import bytes_per_token
from mlxlm.plan.planner import Plan
from mlxlm.plan.scaling_law import CHINCHILLA_LAW, effective_amount
from mlxlm.tokenizer import Tokenizer, tokenizer_stats, train, truncate
from mlxlm.tokenizer.train import check_byte_level_size
from mlxlm.utils.errors import DataError, TokenizerError
from mlxlm.utils.formatting import human_count
from mlxlm.utils.plots import LEGEND_SIZE, TITLE_SIZE, label_axes, new_figure, save_figure

_HELD_OUT_BYTES = 4_000_000  # of text at most that tokenizers are compared on
_LAW_BYTES_PER_TOKEN = bytes_per_token(32_000)  # of the vocabulary that the scaling law was fitted with


@dataclass(frozen=True)
class Compression:
    """Tokenizers of several sizes, trained on one text.

    Attributes:
        bytes_per_token: On text that they weren't trained on, by vocabulary size, in ascending order.
        train_bytes: UTF-8 bytes of the training text.
        supported: The largest vocabulary that the text supports, or the largest that was asked for.
    """

    bytes_per_token: dict[int, float]
    train_bytes: int
    supported: int


def measure_compression(
    data: DataOptions, sizes: Sequence[int], progress: Callable[[int], None] = lambda _num_bytes: None
) -> Compression:
    """Train byte-level tokenizers of several vocabulary sizes, and measure how well they compress.

    Only the largest is trained; the others are its beginning, see `mlxlm.tokenizer.truncate`. Sizes that the text
    doesn't support are left out. The text for the measurement is what `mlxlm.data.prepare` holds out for validation, up
    to 4 MB of it.

    Args:
        data: The text.
        sizes: Vocabulary sizes.
        progress: Called with the number of bytes of text that are read.

    Raises:
        DataError: The text can't be read, or can be read only once.
        TokenizerError: There is too little text, or a size is smaller than bytes and special tokens.
    """
    if (source := unseekable_source(data.sources)) is not None:
        raise DataError(f"{source} can be read only once", "a file")
    check_byte_level_size(min(sizes))
    train_bytes = 0

    def count(text: str) -> str:
        nonlocal train_bytes
        train_bytes += len(text.encode())
        return text

    largest = train(map(count, training_texts(data, progress=progress)), max(sizes), exact=False)
    supported = largest.vocab_size
    fitting = sorted(size for size in set(sizes) if size <= supported)
    if not fitting:
        raise TokenizerError(f"this text supports a vocabulary of {supported} tokens", "smaller `sizes`, or more text")
    left = _HELD_OUT_BYTES

    def within_limit(text: str) -> bool:
        nonlocal left
        left -= len(text)
        return left > 0 or left + len(text) == _HELD_OUT_BYTES  # at least one piece

    held_out = list(takewhile(within_limit, training_texts(data, held_out=True)))

    def measure(tokenizer: Tokenizer) -> float:
        return tokenizer_stats(tokenizer, held_out).bytes_per_token

    return Compression({size: measure(truncate(largest, size)) for size in fitting}, train_bytes, supported)


@dataclass(frozen=True)
class VocabularySize:
    """What a vocabulary size costs and is worth for a model that is trained for a given time.

    Attributes:
        vocab_size: Tokens.
        bytes_per_token: On held-out text.
        parameters: Of the model.
        flops_per_byte: Operations of training on a byte of text.
        seconds_per_epoch: Training time of one pass over the text.
        epochs: Passes over the text in the given time.
        excess_bits: Expected bits per byte after that time, as a fraction above those of the best size.
    """

    vocab_size: int
    bytes_per_token: float
    parameters: int
    flops_per_byte: float
    seconds_per_epoch: float
    epochs: float
    excess_bits: float


def compare_vocabularies(
    compression: Compression, plans: Sequence[Plan], seconds: float
) -> tuple[list[VocabularySize], VocabularySize]:
    """Compare vocabulary sizes by what a model has learned after the same time.

    With a larger vocabulary the model sees more text in the same time, until the output head, which grows with it,
    costs more than that. Expected bits per byte follow from the parameters and the text that the model has seen, by the
    scaling law of Hoffmann et al. 2022, where repeated text counts less (Muennighoff et al. 2023, equation 5). The law
    counts tokens of a vocabulary of 32,000, so the text is counted in these.

    The law was fitted to models of 70M parameters and more, and predicts too high a loss for small ones, so only ratios
    are returned. Measured with the preset 0.3m and equal operations (2.5 epochs of 1 MB, one run each): compared with
    2,048 tokens, 512, 1,024 and 4,096 had +2.4, +2.5 and +0.3% bits per byte on tinyshakespeare, where +5.0, +1.7 and
    +0.1% were expected; on WikiText-2 +2.8, +1.8 and -1.6%, where +4.5, +1.5 and -0.1% were.

    Args:
        compression: The tokenizers.
        plans: The model with each of their sizes. A measured duration has priority.
        seconds: Training time.

    Returns:
        A row for each size, and the best of them.
    """
    law, unique = CHINCHILLA_LAW, compression.train_bytes / _LAW_BYTES_PER_TOKEN
    rows, losses = [], []
    for plan, (size, compressed) in zip(plans, compression.bytes_per_token.items(), strict=True):
        duration = plan.measured_duration or plan.duration
        epoch = compression.train_bytes / compressed / duration.tokens_per_second
        losses.append(law.loss(plan.parameter_count, effective_amount(seconds / epoch * unique, unique)))
        costs = plan.flops.per_token / compressed, epoch, seconds / epoch
        rows.append((size, compressed, plan.parameter_count, *costs))
    sizes = [VocabularySize(*row, loss / min(losses) - 1) for row, loss in zip(rows, losses, strict=True)]
    return sizes, min(sizes, key=lambda size: size.excess_bits)


def plot_vocabularies(sizes: Sequence[VocabularySize], best: VocabularySize, title: str, path: Path) -> None:
    """Draw compression, cost and expected bits per byte over the vocabulary size.

    Raises:
        CheckpointError: The file can't be written.
    """
    figure = new_figure(12, 3.8)
    figure.suptitle(title.replace("$", r"\$"), fontsize=TITLE_SIZE)
    panels: list[tuple[str, Callable[[VocabularySize], float]]] = [
        ("bytes per token (higher is better)", lambda size: size.bytes_per_token),
        ("training operations per byte (lower is better)", lambda size: size.flops_per_byte),
        ("expected bits per byte, % above the lowest", lambda size: 100 * size.excess_bits),
    ]
    x = [size.vocab_size for size in sizes]
    for axes, (label, value) in zip(figure.subplots(1, 3), panels, strict=True):
        label_axes(axes, "vocabulary size", title=label)
        axes.plot(x, [value(size) for size in sizes], "o-", ms=4, color="#246")
        marker = {"ms": 9, "mfc": "none", "color": "#c33", "clip_on": False}
        axes.plot([best.vocab_size], [value(best)], "o", **marker, label=f"{best.vocab_size:,}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(x, [f"{size // 1024}k" if size % 1024 == 0 else str(size) for size in x], fontsize=LEGEND_SIZE)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _position: human_count(value))
        axes.set_ylim(bottom=0)
    axes.legend(title="recommended", fontsize=LEGEND_SIZE, title_fontsize=LEGEND_SIZE)
    save_figure(figure, path)
