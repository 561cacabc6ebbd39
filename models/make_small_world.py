"""Make the bundled model models/small-world: train it, quantize it, and write its receipt and model card.

python models/make_small_world.py FOLDER   # continues if FOLDER has a run that was interrupted
"""

from __future__ import annotations

import shutil
import sys
from itertools import islice
from pathlib import Path

from mlxlm.chat.generate import batch
from mlxlm.cli.training import phase, run_training
from mlxlm.data.small_world.corpus import EVALUATED_KINDS, held_out_questions
from mlxlm.evaluate.small_world import evaluate_small_world
from mlxlm.experiments.receipt import FILE_NAME, Receipt, Recipe
from mlxlm.families import config_to_hf, load_preset
from mlxlm.generation import load
from mlxlm.generation.loaded_model import GenerationConfig
from mlxlm.quantize import quantize
from mlxlm.train import Run
from mlxlm.utils.formatting import human_count
from mlxlm.utils.json_files import write_json

HERE = Path(__file__).parent
MODEL = HERE / "small-world"
TEMPERATURE = 0.4
QUESTIONS = 100  # of each kind, some have fewer
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
}
SETTINGS = {
    "steps": 3600,
    "learning_rate": 4e-3,
    "batch_size": 4,
    "max_seq_length": 512,
    "packing": "best-fit",
    "document_mask": True,
    "mask_prompt": True,
    "eval_every": 500,
    "eval_tokens": 65536,
    "save_every": 500,
    "seed": 0,
}
EXAMPLE = "Tell me a story about Anna and a kite."
CARD = """# small-world

A language model of {parameters} parameters that ships with mlxlm, so that its examples run offline. It was trained from
scratch with mlxlm on the built-in corpus (`mlxlm prepare --builtin small-world`): stories, questions about them, sums,
sorting, spelling, opposites, names and small talk, in simple English. It is quantized to 4 bits ({size:,} bytes).

```sh
mlxlm chat small-world
```

- **It knows nothing else.** Names, places and things are those of its corpus, numbers go up to 20, and to most other
  questions it answers that it doesn't know, or something made up. Don't use it for anything but trying out software.
- **Context**: {context} tokens.
- **Architecture**: that of Qwen 3, with 3 layers and a hidden size of 256. All weights were trained here.
- **Training**: {steps:,} steps of 2,048 tokens in {hours:.1f} hours on {cores} cores of {chip}. `mlxlm models verify`
  trains the first steps again and compares the bits with [receipt.json](receipt.json); with `--all`, all of them.
- **Bits per byte** of held-out conversations, of which the model predicts the answers, in float32: {bits_per_byte:.4f}.
- **License**: MIT, as mlxlm.

## Score

Right answers to questions whose combination of words doesn't occur in the training text, at 4 bits, with greedy
decoding: `mlxlm evaluate small-world --small-world --num-questions {questions}`.

| questions | right |
|---|---|
{scores}

## Samples

The first held-out question of each kind, answered with temperature {temperature} and seed 0. Nothing is selected.

{samples}
"""


def main(folder: Path) -> None:
    """Train, quantize, measure, and write models/small-world."""
    recipe = Recipe(50_000_000, 0, config_to_hf(load_preset("1m", **CONFIG)), SETTINGS)
    run = Run.open(folder / "run") if (folder / "run").exists() else recipe.start(folder / "run", phase)
    if not (run.path / "model.safetensors").exists() or "finished" not in run.log_file.read_text():
        run_training(run, resume=True)
    shutil.rmtree(MODEL, ignore_errors=True)
    quantize(run.path, MODEL, bits=4)
    for file in MODEL.glob("quantization.*"):
        file.unlink()
    GenerationConfig({"temperature": TEMPERATURE}, EXAMPLE).write(MODEL)
    receipt = Receipt.of_run(run, MODEL)
    write_json(MODEL / FILE_NAME, receipt.to_dict())
    (MODEL / "README.md").write_text(card(run, receipt))


def card(run: Run, receipt: Receipt) -> str:
    """The model card, with the score and samples of the quantized model."""
    lm, results = load(MODEL), receipt.results
    scores = evaluate_small_world(lm, QUESTIONS)
    turns = [turn for kind in EVALUATED_KINDS for turn in islice(held_out_questions(kind), 1)]
    messages = [[{"role": "user", "content": turn.question}] for turn in turns]
    answers = batch(lm, messages=messages, max_tokens=200, temperature=TEMPERATURE, seed=0)
    right, asked = sum(score.correct for score in scores), sum(score.questions for score in scores)
    rows = [*((score.kind, score.correct, score.questions) for score in scores), ("all", right, asked)]
    return CARD.format(
        parameters=human_count(run.config.parameter_count()),
        size=sum(file.stat().st_size for file in MODEL.iterdir()),
        context=run.config.max_position_embeddings,
        steps=results["steps"],
        hours=results["seconds"] / 3600,
        cores=results["environment"]["cores"],
        chip=results["environment"]["chip"],
        bits_per_byte=results["bits_per_byte"],
        questions=QUESTIONS,
        scores="\n".join(f"| {kind} | {correct} of {questions} |" for kind, correct, questions in rows),
        temperature=TEMPERATURE,
        samples="\n\n".join(
            f"> {turn.question}\n\n{answer.text.strip()}" for turn, answer in zip(turns, answers, strict=True)
        ),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
