"""Extract facts from a file of texts, one per line, to a CSV table. A JSON schema makes every answer a row.

    python examples/extract_to_csv.py my-model reviews.txt > reviews.csv

Replace SCHEMA by the columns that you want. The schema guarantees the form of the answers, not that they are true.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

import mlxlm

SCHEMA = {
    "type": "object",
    "properties": {
        "product": {"type": "string", "minLength": 1, "maxLength": 40},
        "opinion": {"enum": ["good", "bad", "mixed"]},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["product", "opinion", "stars"],
    "additionalProperties": False,
}
TASK = "Which product is this review about, is it good, bad or mixed, and how many stars does it give?"


def main() -> None:
    """Write a row for each line; report lines without an answer on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    options = parser.parse_args()

    texts = [line for line in options.file.read_text().splitlines() if line.strip()]
    questions = [[{"role": "user", "content": f"{TASK}\n\n{text}"}] for text in texts]
    lm = mlxlm.load(options.model)
    results = mlxlm.batch(lm, messages=questions, json_schema=SCHEMA, temperature=0) if texts else []
    rows = csv.DictWriter(sys.stdout, [*SCHEMA["properties"], "text"])
    rows.writeheader()
    for text, result in zip(texts, results, strict=True):
        if result.constraint_error:
            print(f"no answer for {text!r}: {result.constraint_error}", file=sys.stderr)
        else:
            rows.writerow({**json.loads(result.text), "text": text})


if __name__ == "__main__":
    main()
