"""The hostfile that `--hosts` and `--num-processes` mean, and the command line for the hosts."""

import io
import json
import os

import pytest

from mlxlm.cli import launch as module
from mlxlm.cli import rank_process
from mlxlm.cli.launch import make_hostfile, strip_options
from mlxlm.utils.errors import ConfigError

HERE = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}


@pytest.fixture
def network(monkeypatch):
    """This machine is 10.0.0.1, beside a and b."""
    addresses = {"here": "10.0.0.1", "a": "10.0.0.2", "b": "10.0.0.3", "localhost": "127.0.0.1"}

    def address(name: str) -> str:
        if name in addresses.values():
            return name
        if name not in addresses:
            raise OSError
        return addresses[name]

    monkeypatch.setattr(module.socket, "gethostbyname", address)
    monkeypatch.setattr(module, "_is_own", lambda host: host["ips"][0] in ("10.0.0.1", "127.0.0.1"))


def test_processes_on_this_machine(network, monkeypatch):
    monkeypatch.setattr(module.platform, "cpu_cores", lambda: 4)
    with pytest.raises(ConfigError, match="5 processes for 4 cores.*--num-processes 4"):
        make_hostfile(None, 5)
    assert make_hostfile(None, 3) == {"backend": "ring", "hosts": [HERE] * 3}
    assert make_hostfile("localhost,127.0.0.1", None) == {"backend": "ring", "hosts": [HERE] * 2}


def test_machines_by_name_or_address_this_one_without_ssh(network):
    assert make_hostfile("here, 10.0.0.2,b", None)["hosts"] == [
        {"ssh": "127.0.0.1", "ips": ["10.0.0.1"]},
        {"ssh": "10.0.0.2", "ips": ["10.0.0.2"]},
        {"ssh": "b", "ips": ["10.0.0.3"]},
    ]


def test_a_hostfile_keeps_what_mlx_needs(network, tmp_path):
    file = tmp_path / "hosts.json"
    hosts = [
        {"ssh": "here", "ips": ["10.0.0.1"], "rdma": [None, "rdma_en2"]},
        {"ssh": "a", "ips": ["10.0.0.2"], "rdma": ["rdma_en2", None]},
    ]
    file.write_text(json.dumps({"backend": "jaccl", "envs": ["A=1"], "hosts": hosts}))
    own = {**hosts[0], "ssh": "127.0.0.1"}
    assert make_hostfile(str(file), None) == {"backend": "jaccl", "envs": ["A=1"], "hosts": [own, hosts[1]]}
    file.write_text(json.dumps(hosts))
    assert make_hostfile(str(file), None) == {"backend": "ring", "hosts": [own, hosts[1]]}


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("here", "one host is no reason"),
        ("a,here", "a is not this machine.*this machine first"),
        ("localhost,a", "can't reach this one as localhost"),
        ("here,c", "c has no address"),
        ("here,", "an empty name has no address"),
        ("here,a..b", "a..b has no address"),
        ("here,-oProxyCommand=x", "-oProxyCommand=x has no address"),
        ("nowhere.json", "there is no file nowhere.json"),
    ],
)
def test_hosts_that_cannot_work(network, hosts, message):
    with pytest.raises(ConfigError, match=message):
        make_hostfile(hosts, None)


@pytest.mark.parametrize(
    "content",
    [
        "{", "[1]", '{"hosts": 3}', '[{"ssh": "a"}]', '[{"ssh": "a", "ips": []}]', '"ab"', "[" * 100_000,
        '[{"ssh": "a", "ips": "10.0.0.1"}]', '[{"ssh": "a", "ips": [""]}]', '[{"ssh": "a", "ips": ["1\\u00002"]}]',
        '[{"ssh": "-oProxyCommand=touch x", "ips": ["10.0.0.1"]}]', '[{"ssh": "a b", "ips": ["10.0.0.1"]}]',
        '{"envs": "A=1", "hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_hostfile(network, tmp_path, content):
    file = tmp_path / "hosts.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="hosts.json is not a hostfile"):
        make_hostfile(str(file), None)


def test_a_hostfile_of_another_backend(network, tmp_path):
    (tmp_path / "hosts.json").write_text('{"backend": "nonsense", "hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}]}')
    with pytest.raises(ConfigError, match="backend is 'nonsense', it must be one of ring, jaccl"):
        make_hostfile(str(tmp_path / "hosts.json"), None)


@pytest.mark.parametrize(
    ("cores", "num_processes", "shares"), [(4, 2, [{0, 1}, {2, 3}]), (3, 2, [{0}, {1, 2}]), (1, 2, [{0}] * 2)]
)
def test_processes_share_the_cores_of_a_machine(monkeypatch, cores, num_processes, shares):
    taken = []
    monkeypatch.setattr(rank_process.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(rank_process.os, "sched_setaffinity", lambda pid, own: taken.append(set(own)), raising=False)
    for rank in range(num_processes):
        rank_process.limit_to_share(rank, num_processes)
    rank_process.limit_to_share(0, 1)
    assert taken == shares


def test_the_hosts_get_the_command_line_without_the_hosts():
    flags = ("--hosts", "--num-processes")
    given = [
        "pretrain",
        "data",
        "--hosts",
        "a,b",
        "--out",
        "x",
        "--num-processes=2",
        "--hosts=a",
        "--num-processes",
        "2",
    ]
    assert strip_options(given, flags) == ["pretrain", "data", "--out", "x"]


def test_what_nobody_reads_is_read_from_the_processes_all_the_same():
    """They would wait for room in their pipe; and how each has ended is told there, too."""
    reader, writer = os.pipe()
    os.close(reader)
    group = module._Group(None, 2, b"\x1esecret ")
    with open(writer, "wb") as target:
        group._pass_on(io.BytesIO(b"step 1\nstep 2\n\x1esecret 1 exit 0\n"), target)
    assert group._codes == {1: 0}
