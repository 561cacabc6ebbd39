"""Decoding speed with and without speculative decoding, by prompt lookup, a draft model and a draft head.

    python benchmarks/speculative.py MODEL [--draft-model MODEL] [--prose FILE] [--rounds 5] [--tokens 256]
    python benchmarks/speculative.py MODEL --text FILE... [--draft-head FOLDER] [--prompts 4]

For prompt lookup the text is fixed and the cost is MODEL's: its logits are raised for the tokens of the text. `edit`
is a source file with every fourth line changed, after a prompt with the file; `prose` is a passage that hardly repeats
itself. With --draft-model, that model also proposes the prose, with a fixed share of correct tokens, and MODEL
generates freely, greedy and sampled. The texts with and without speculation must be equal. Each case has one warm-up,
and keeps its SpeculativeDecoder, as a chat does.

With --text, MODEL continues 128 tokens of each file at several places, greedy and sampled, by prompt lookup and by the
head that `mlxlm draft` has trained, alone and together. The places should not be in the head's training text.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from common import in_turn, median, report, spread

import mlxlm
from mlxlm.backend.mlx import mx
from mlxlm.generation import LoadedModel
from mlxlm.generation.draft_head import DraftHead
from mlxlm.generation.drafters import DraftModel, PromptLookup
from mlxlm.generation.speculative import SpeculativeDecoder

GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft-model", help="a smaller model with the same tokenizer")
    parser.add_argument("--prose", type=Path, default=Path(__file__).parents[1] / "README.md", help="a text file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--max-draft", type=int, default=8, help="maximum number of proposed tokens")
    parser.add_argument("--text", type=Path, nargs="+", help="files to continue instead")
    parser.add_argument("--draft-head", type=Path, help="a folder of `mlxlm draft`")
    parser.add_argument("--prompts", type=int, default=4, help="places of each file")
    options = parser.parse_args()
    lm = mlxlm.load(options.model)
    if options.text:
        continue_texts(lm, options)
        return
    encode = lm.tokenizer.encode
    code = Path(__file__).read_text(encoding="utf-8").splitlines(keepends=True)[30:60]
    changed = [f"{line.rstrip()}  # see above\n" if i % 4 == 2 else line for i, line in enumerate(code)]
    file, edit = encode("".join(code)), encode("".join(changed))
    prose = encode(options.prose.read_text(encoding="utf-8")[:6000])[: 128 + options.tokens]
    cases = {
        "edit, lookup": (scripted(lm, file + edit), file, GREEDY, PromptLookup()),
        "prose, lookup": (scripted(lm, prose), prose[:128], GREEDY, PromptLookup()),
    }
    if options.draft_model:
        small, rng = mlxlm.load(options.draft_model), random.Random(0)
        for share in (0.3, 0.6, 0.8, 0.95):
            guesses = [id if rng.random() < share else (id + 1) % 256 for id in prose]
            draft = DraftModel(scripted(small, guesses))
            cases[f"prose, draft model right about {share:.0%}"] = scripted(lm, prose), prose[:128], GREEDY, draft
        cases["greedy, draft model"] = lm, prose[:128], GREEDY, DraftModel(small)
        cases["sampled, draft model"] = lm, prose[:128], SAMPLED, DraftModel(small)
    result, rows = {}, []
    for name, (model, prompt, sampling, drafter) in cases.items():
        count = min(options.tokens, len(edit)) if prompt is file else options.tokens
        arguments = {"prompt": prompt, "max_tokens": count, **sampling}
        speculation = SpeculativeDecoder(drafter, num_draft_tokens=options.max_draft)
        plain, guessed = Run(model, None, arguments), Run(model, speculation, arguments)
        plain(), guessed()
        results = in_turn(options.rounds, plain=plain, guessed=guessed, again=plain)
        if plain.tokens != guessed.tokens:
            raise SystemExit(f"{name}: another text")
        ratio, noise = (
            median([a / b for a, b in zip(results[way], results["plain"], strict=True)]) for way in ("guessed", "again")
        )
        stats = guessed.stats
        rows.append((f"{name}: plain", f"{spread(results['plain'])} tokens/s; once more {noise:.2f} x"))
        counts_text = f"{stats.accepted} of {stats.proposed} accepted; {stats.reason or 'active'}"
        rows.append((f"{name}: speculation", f"{spread(results['guessed'])} tokens/s, {ratio:.2f} x; {counts_text}"))
        counts = {"proposed": stats.proposed, "accepted": stats.accepted}
        result[name] = {"ratio": round(ratio, 2), "noise": round(noise, 2), **counts}
    report(f"speculation, {options.tokens} tokens", rows, {"benchmark": "speculative", "texts": result})


def continue_texts(lm: LoadedModel, options: argparse.Namespace) -> None:
    """Continue parts of texts with each drafter, in turn with plain decoding."""
    drafters = {"lookup": [PromptLookup()]}
    if options.draft_head:
        head = DraftHead.load(options.draft_head)
        drafters |= {"head": [head], "lookup and head": [PromptLookup(), head]}
    rows, result = [], {}
    for path in options.text:
        ids = lm.tokenizer.encode(path.read_text(encoding="utf-8"))
        prompts = [ids[i * len(ids) // options.prompts :][:128] for i in range(options.prompts)]
        for how, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            runs = {"plain": [None] * len(prompts)}
            runs |= {name: [SpeculativeDecoder(*some, num_draft_tokens=options.max_draft)] * len(prompts)
                     for name, some in drafters.items()}  # fmt: skip
            runs = {
                name: [
                    Run(lm, speculation, {"prompt": prompt, "max_tokens": options.tokens, **sampling})
                    for speculation, prompt in zip(speculations, prompts, strict=True)
                ]
                for name, speculations in runs.items()
            }
            speeds = {name: [] for name in runs}
            passes, accepted, proposed = (dict.fromkeys(runs, 0) for _ in range(3))
            for turn in zip(*runs.values(), strict=True):
                turn[0]()  # reads the prompt
                for name, run in zip(runs, turn, strict=True):
                    speeds[name].append(run())
                    if run.tokens != turn[0].tokens:
                        raise SystemExit(f"{path}, {name}: another text")
                    passes[name] += len(run.tokens) - (run.stats.accepted if run.stats else 0)
                    accepted[name] += run.stats.accepted if run.stats else 0
                    proposed[name] += run.stats.proposed if run.stats else 0
            for name in drafters:
                ratio = median([a / b for a, b in zip(speeds[name], speeds["plain"], strict=True)])
                share, per_pass = accepted[name] / max(1, proposed[name]), passes["plain"] / passes[name]
                shown = f"{ratio:.2f} x, {per_pass:.2f} tokens per pass, {share:.0%} of {proposed[name]} accepted"
                rows.append((f"{path.stem}, {how}, {name}", shown))
                result[rows[-1][0]] = {"ratio": round(ratio, 2), "tokens_per_pass": round(per_pass, 2)}
    report(f"speculation, {options.tokens} tokens", rows, {"benchmark": "speculative", "texts": result})


class Scripted:
    """A model that generates `ids`: it runs `model`, then raises the logits of the next tokens."""

    def __init__(self, model, ids: Sequence[int]):
        self._model, self._ids, self.layers = model, mx.array([*ids, *([0] * 64)]), model.layers

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        first = cache[0].offset + 1
        logits = self._model(tokens, cache=cache)
        wanted = self._ids[first : first + tokens.shape[1]]
        return logits.at[:, mx.arange(len(wanted)), wanted].add(1000)


def scripted(lm: LoadedModel, ids: Sequence[int]) -> LoadedModel:
    return LoadedModel(Scripted(lm.model, ids), lm.tokenizer, lm.config, lm.path)


class Run:
    """Generates one text when called, and returns tokens/s after the first token."""

    def __init__(self, lm: LoadedModel, speculation: SpeculativeDecoder | None, arguments: dict):
        self._loaded, self._arguments = lm, {**arguments, "speculation": speculation}
        self.tokens = self.stats = None

    def __call__(self) -> float:
        stream = mlxlm.stream(self._loaded, **self._arguments)
        times = [time.perf_counter() for _ in stream]
        result = stream.result()
        self.tokens, self.stats = result.tokens, result.speculation
        return (len(times) - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    main()
