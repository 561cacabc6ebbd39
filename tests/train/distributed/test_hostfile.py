"""The hostfile of `--hosts`."""

import json

import pytest

from mlxlm.train.distributed import hostfile as module
from mlxlm.train.distributed.hostfile import make_hostfile
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
    monkeypatch.setattr(module, "_is_this_machine", lambda host: host["ips"][0] in ("10.0.0.1", "127.0.0.1"))


def test_processes_on_this_machine(network, monkeypatch):
    monkeypatch.setattr(module.platform, "cpu_cores", lambda: 4)
    with pytest.raises(ConfigError, match="5 processes for 4 cores.*4 or fewer"):
        make_hostfile(",".join(["127.0.0.1"] * 5))
    assert make_hostfile("localhost,127.0.0.1") == {"backend": "ring", "hosts": [HERE] * 2}


def test_machines_by_name_or_address_this_one_without_ssh(network):
    assert make_hostfile("here, 10.0.0.2,b")["hosts"] == [
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
    assert make_hostfile(str(file)) == {"backend": "jaccl", "envs": ["A=1"], "hosts": [own, hosts[1]]}
    file.write_text(json.dumps(hosts))
    assert make_hostfile(str(file)) == {"backend": "ring", "hosts": [own, hosts[1]]}


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("here", "--hosts has only one host"),
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
        make_hostfile(hosts)


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
        make_hostfile(str(file))


def test_a_hostfile_of_another_backend(network, tmp_path):
    (tmp_path / "hosts.json").write_text('{"backend": "nonsense", "hosts": [{"ssh": "a", "ips": ["10.0.0.1"]}]}')
    with pytest.raises(ConfigError, match="backend is 'nonsense', it must be one of ring, jaccl"):
        make_hostfile(str(tmp_path / "hosts.json"))
