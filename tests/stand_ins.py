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
    from mlx.utils import tree_flatten

    from mlxlm.backend.mlx import mx
    from mlxlm.data import CHAT_TEMPLATE
    from mlxlm.families import config_to_hf
    from mlxlm.model import Decoder
    from mlxlm.utils.json_files import write_json

    model = Decoder(tiny_config.with_changes(num_attention_heads=2, head_dim=32, max_position_embeddings=1024))
    model.init_weights(seed=3)
    (folder / "my-model").mkdir()
    write_json(folder / "my-model" / "config.json", config_to_hf(model.config))
    mx.save_safetensors(str(folder / "my-model" / "model.safetensors"), dict(tree_flatten(model.parameters())))
    tiny_tokenizer.chat_template = CHAT_TEMPLATE
    tiny_tokenizer.save(folder / "my-model")
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
