"""Answer a question from your notes: find the most similar passages by embeddings, and let the model read them.

    mlxlm serve my-model
    python examples/ask_notes.py my-model notes/ "When is the garden open?"

It uses OpenAI's client, so that it also works with other servers. Embeddings of a language model compare texts worse
than those of an embedding model: with two models, serve both, and give the other one as --embedding-model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from openai import OpenAI

WORDS = 100  # of a passage


def passages(text: str) -> list[str]:
    """The paragraphs of a text; long ones are cut into passages."""
    paragraphs = [part.split() for part in text.split("\n\n")]
    return [" ".join(words[i : i + WORDS]) for words in paragraphs for i in range(0, len(words), WORDS)]


def main() -> None:
    """Print the answer, and the files that it comes from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--embedding-model", help="by default the same model")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--passages", type=int, default=3, help="how many the model reads")
    options = parser.parse_args()

    files = [path for pattern in ("*.txt", "*.md") for path in sorted(options.folder.rglob(pattern))]
    notes = [(path, text) for path in files for text in passages(path.read_text())]
    if not notes:
        parser.error(f"there are no notes in {options.folder}")
    client = OpenAI(base_url=options.base_url, api_key="none")
    texts = [*(text for _, text in notes), options.question]
    answer = client.embeddings.create(model=options.embedding_model or options.model, input=texts)
    vectors = np.array([item.embedding for item in answer.data])  # of length 1
    similarity = vectors[:-1] @ vectors[-1]
    found = [notes[i] for i in np.argsort(-similarity)[: options.passages]]

    context = "\n\n".join(text for _, text in found)
    question = f"Answer from these notes only.\n\n{context}\n\nQuestion: {options.question}"
    messages = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=options.model, messages=messages, temperature=0, max_tokens=200)
    print(answer.choices[0].message.content)
    print("from", ", ".join(sorted({str(path) for path, _ in found})))


if __name__ == "__main__":
    main()
