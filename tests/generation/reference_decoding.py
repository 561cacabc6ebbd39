"""The plainest loop of generation, which engines are compared with, and a prompt for it."""

from mlxlm.backend.mlx import mx

PROMPT = [5, 9, 200, 17, 33, 33, 90, 41, 7, 123, 64]


def greedy(logits):
    return mx.argmax(logits, axis=-1)


def naive(model, prompt, n):
    """Greedy tokens, each from a forward pass over everything before it."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(model(mx.array([ids]))[0, -1].argmax().item())
    return ids[len(prompt) :]
