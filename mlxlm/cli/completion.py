"""Shell completion: answers the shell's requests, and installs the script that makes them."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class, shell_complete

from mlxlm.utils.errors import PlatformError, os_errors_as
from mlxlm.utils.files import write_bytes

SHELLS = ("bash", "zsh", "fish")
COMPLETION_VARIABLE = "_MLXLM_COMPLETE"  # set by the script
_HEADER = "# Completion for mlxlm, written by mlxlm --install-completion.\n"
_MARK = "# mlxlm completion"
# Where the package bash-completion is, which loads the scripts of its folder.
_BASH_COMPLETION = (
    "/usr/share/bash-completion/bash_completion",
    "/opt/homebrew/etc/profile.d/bash_completion.sh",
    "/usr/local/etc/profile.d/bash_completion.sh",
)


def answer(cli: click.Command) -> int:
    """Print the completions that the shell asks for. Returns the exit code."""
    return shell_complete(cli, {}, "mlxlm", COMPLETION_VARIABLE, os.environ[COMPLETION_VARIABLE])


def install(cli: click.Command, shell: str | None = None) -> None:
    """Install the completion of a shell, by default that of $SHELL, and say what that changed.

    Raises:
        PlatformError: It is another shell, a file can't be written, or another one has its name.
    """
    from mlxlm.cli.render import say  # rich takes a while to import, and answers must be quick

    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in SHELLS:
        raise PlatformError(f"there is no completion for the shell {shell!r}", f"one of {', '.join(SHELLS)}")
    completion = get_completion_class(shell)
    assert completion is not None
    script = _HEADER + completion(cli, {}, "mlxlm", COMPLETION_VARIABLE).source()
    path, settings, line = _places(shell)
    changes = _write_script(path, script) + (_add_line(settings, line) if settings else [])
    ending = f"It works in new {shell} terminals; in this one after: exec {shell}"
    for message in [*changes, ending] if changes else ["nothing to do: it is installed already"]:
        say(message)


def _places(shell: str) -> tuple[Path, Path | None, str]:
    """Return where the script belongs, and the settings file and the line that load it, if nothing else does."""
    home = Path(os.path.expanduser("~"))
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share")
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish/completions/mlxlm.fish", None, ""
    if shell == "zsh":
        path = data / "mlxlm/completion.zsh"
        settings = Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
        line = f"(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}; {_source(path)}"
        return path, settings, line
    folder = Path(os.environ.get("BASH_COMPLETION_USER_DIR") or data / "bash-completion") / "completions"
    path = folder / "mlxlm"
    if any(map(os.path.exists, _BASH_COMPLETION)):
        return path, None, ""
    # Terminals of macOS start login shells.
    return path, home / (".bash_profile" if sys.platform == "darwin" else ".bashrc"), _source(path)


def _source(path: Path) -> str:
    quoted = shlex.quote(str(path))
    return f"[ -f {quoted} ] && source {quoted}"


def _write_script(path: Path, script: str) -> list[str]:
    """Write the script. Returns what that changed."""
    with os_errors_as(PlatformError, "write", path):
        old = path.read_text(encoding="utf-8") if path.exists() else None
        if old == script:
            return []
        if old is not None and not old.startswith(_HEADER):
            raise PlatformError(f"{path} was not written by mlxlm", "move it away, then install the completion again")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, script.encode("utf-8"), PlatformError)
    return [f"wrote {path}"]


def _add_line(path: Path, line: str) -> list[str]:
    """Append a line to a settings file, unless it has one of mlxlm. Returns what that changed."""
    with os_errors_as(PlatformError, "write", path):
        old = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if _MARK in old:
            return []
        separator = "" if not old or old.endswith("\n") else "\n"
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{separator}{line}  {_MARK}\n")
    return [f"added a line to {path}"]


def install_option() -> click.Option:
    """`--install-completion` of the program."""
    text = "Install completion of commands, options and models in your shell, then exit."
    settings: dict[str, Any] = {"is_flag": False, "flag_value": "", "expose_value": False, "is_eager": True}
    return click.Option(["--install-completion"], metavar="[SHELL]", callback=_install, help=text, **settings)


def _install(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    if value is not None and not ctx.resilient_parsing:
        install(ctx.command, value or None)
        ctx.exit()
