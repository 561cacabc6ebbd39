"""The hostfile for `--hosts`: which machines train, as `mlx.launch` reads it."""

from __future__ import annotations

import json
import re
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxlm.backend import platform
from mlxlm.utils import bounded_reads
from mlxlm.utils.errors import ConfigError

LOCALHOST = "127.0.0.1"  # the host that mlx.launch starts without ssh
BACKENDS = ("ring", "jaccl")


def make_hostfile(hosts: str) -> dict[str, Any]:
    """Return the content of a hostfile. This machine must come first: it leads the run and has its folder.

    Args:
        hosts: Names or addresses, separated by commas; or the path of a hostfile.

    Raises:
        ConfigError: These hosts can't train together.
    """
    if hosts.endswith(".json") and not Path(hosts).exists():
        raise ConfigError(f"--hosts: there is no file {hosts}", "the path of a hostfile, or names, a,b,c")
    if Path(hosts).is_file():
        content = _read_hostfile(Path(hosts))
    else:
        content = {"hosts": [_resolve(name.strip()) for name in hosts.split(",")]}
    entries = [{**host, "ssh": LOCALHOST if _is_this_machine(host) else host["ssh"]} for host in content["hosts"]]
    if len(entries) < 2:
        raise ConfigError("--hosts has only one host", "two or more, or the command without --hosts")
    if entries[0]["ssh"] != LOCALHOST:
        raise ConfigError(f"{entries[0]['ssh']} is not this machine, which leads the run", "this machine first")
    local, limit = [host for host in entries if host["ssh"] == LOCALHOST], max(2, platform.cpu_cores())
    if len(local) > limit:
        raise ConfigError(f"{len(local)} processes for {platform.cpu_cores()} cores", f"{limit} or fewer")
    if len(local) < len(entries) and any(ip.startswith("127.") for host in local for ip in host["ips"]):
        raise ConfigError("other machines can't reach this one as localhost", "its name or address in the network")
    return {"backend": "ring", **content, "hosts": entries}


def _read_hostfile(path: Path) -> dict[str, Any]:
    hint = 'MLX\'s form, [{"ssh": "a", "ips": ["10.0.0.1"]}, ...], as mlx.distributed_config writes it'
    try:
        content = json.loads(bounded_reads.read_bytes(path, 1 << 20, ConfigError))
        content = content if isinstance(content, dict) else {"hosts": content}
        for host in content["hosts"]:
            ips = host["ips"]
            if not (isinstance(ips, list) and ips and all(map(_is_host_name, [host["ssh"], *ips]))):
                raise TypeError
        envs, backend = content.get("envs", []), content.get("backend", "ring")
        if not (isinstance(envs, list) and all(isinstance(env, str) for env in envs)):
            raise TypeError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ConfigError(f"{path} is not a hostfile", hint) from None
    if backend not in BACKENDS:
        raise ConfigError(f"{path}: backend is {backend!r}, it must be one of {', '.join(BACKENDS)}")
    return content


def _is_host_name(text: Any) -> bool:
    """Whether this can be the name or address of a host, and not an option of ssh."""
    return isinstance(text, str) and re.fullmatch(r"[\w\[][\w.:%@\[\]-]*", text) is not None


def _resolve(name: str) -> dict[str, Any]:
    try:
        if not _is_host_name(name):  # an empty name has the address 0.0.0.0
            raise OSError
        return {"ssh": name, "ips": [socket.gethostbyname(name.rpartition("@")[2])]}
    except (OSError, UnicodeError):
        raise ConfigError(f"--hosts: {name or 'an empty name'} has no address", "names or addresses, a,b,c") from None


def _is_this_machine(host: dict[str, Any]) -> bool:
    """Whether an address of the host is this machine's: a socket can be bound to it."""
    with socket.socket() as probe, suppress(OSError):
        probe.bind((host["ips"][0], 0))
        return True
    return False
