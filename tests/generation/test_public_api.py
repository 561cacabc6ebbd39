"""The names of the package: all there, none of which costs anything before it is used."""

import subprocess
import sys

import mlxlm
from mlxlm import chat, generation


def test_public_names():
    functions = {"batch", "batch_as_completed", "embed", "generate", "hidden_states", "load", "score", "stream"}
    assert set(mlxlm.__all__) == {"Chat", "plan", *functions}
    assert set(mlxlm.__all__) <= set(dir(mlxlm)) and "import_module" not in dir(mlxlm)
    for name in ("embed", "hidden_states", "load", "score"):
        assert getattr(mlxlm, name) is getattr(generation, name)
    for name in ("batch", "batch_as_completed", "generate", "stream"):
        assert getattr(mlxlm, name) is getattr(chat.generate, name)
    assert mlxlm.Chat is chat.session.Chat
    assert mlxlm.plan("1m").parameters == mlxlm.plan.plan("1m").parameters
    assert all(hasattr(generation, name) for name in generation.__all__)


def test_imports_are_lazy():
    """`import mlxlm` loads nothing large, and generation no library that it doesn't use."""
    code = (
        "import sys, mlxlm\n"
        "print(sorted({'mlx', 'numpy', 'transformers', 'llguidance', 'mlx_lm'} & set(sys.modules)))\n"
        "mlxlm.batch\n"
        "print(sorted({'transformers', 'llguidance', 'mlx_lm'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n[]\n"
