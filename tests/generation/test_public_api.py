"""The names of the package: all there, none of which costs anything before it is used."""

import subprocess
import sys

import mlxlm
from mlxlm import chat, generation


def test_every_name_is_there():
    assert set(mlxlm.__all__) == {"Chat", "batch", "generate", "load", "plan", "score", "stream"}
    for name in ("batch", "generate", "load", "score", "stream"):
        assert getattr(mlxlm, name) is getattr(generation, name)
    assert mlxlm.Chat is chat.session.Chat
    assert mlxlm.plan("1m").parameters == mlxlm.plan.plan("1m").parameters
    assert all(hasattr(generation, name) for name in generation.__all__)


def test_importing_the_package_imports_nothing_large():
    large = "{'mlx', 'numpy', 'transformers', 'llguidance', 'mlx_lm'}"
    code = f"import sys, mlxlm; print(sorted({large} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_generating_imports_no_library_that_it_does_not_use():
    code = "import sys, mlxlm; mlxlm.batch; print(sorted({'transformers', 'llguidance', 'mlx_lm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
