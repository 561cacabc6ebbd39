"""Small stand-ins for what the examples of the documentation name: a chat model, its server, and texts."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager

from tests.paths import ROOT


def make_stand_ins(folder, tiny_config, tiny_tokenizer, make_text):
    """Write `my-model`, which has a chat template, `stories.txt`, `book.txt`, `chats.jsonl` and `questions.jsonl`."""
    from mlxlm.data import CHAT_TEMPLATE
    from tests.small_models import random_decoder, write_folder

    config = tiny_config.with_changes(num_attention_heads=2, head_dim=32, max_position_embeddings=1024)
    tiny_tokenizer.chat_template = CHAT_TEMPLATE
    write_folder(folder / "my-model", random_decoder(config, seed=3), config, tiny_tokenizer)
    tiny_tokenizer.chat_template = None
    (folder / "stories.txt").write_text(make_text(3000), encoding="utf-8")
    (folder / "book.txt").write_text(make_text(600), encoding="utf-8")
    question = {"question": "The cat sat on a", "choices": [" mat", " garden"], "answer": 0}
    (folder / "questions.jsonl").write_text(json.dumps(question) + "\n", encoding="utf-8")
    turns = [("user", "Where did the cat sit?"), ("assistant", "The cat sat on a mat.")]
    chat = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    (folder / "chats.jsonl").write_text(f"{chat}\n" * 40, encoding="utf-8")
    return folder


@contextmanager
def serve(model):
    """Run a server; yields its host and port."""
    command = [sys.executable, ROOT / "cli.py", "serve", model, "--port", "0", "--log-level", "error"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as server:
        try:
            yield re.search(r"127\.0\.0\.1:\d+", server.stderr.readline())[0]
        finally:
            server.terminate()
