"""The command line that the hosts of a run get."""

from mlxlm.cli.launch import strip_options


def test_the_hosts_get_the_command_line_without_the_hosts():
    flags = ("--hosts", "--num-processes")
    args = ["pretrain", "data", "--hosts", "a,b", "--out", "x", "--num-processes=2", "--hosts=a"]
    assert strip_options(args, flags) == ["pretrain", "data", "--out", "x"]
