"""Imports between packages go one way, and no module imports itself through others."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.paths import ROOT

# Lower tiers first. A package may import from its own tier, as long as that makes no cycle, and from those below.
TIERS = (
    ("utils",),
    ("backend",),
    ("config",),
    ("families",),
    ("kernels", "tokenizer"),
    ("model", "data"),
    ("cache", "checkpoint"),
    ("generation", "plan"),
    ("chat", "evaluate", "report"),
    ("train",),
    ("experiments", "quantize", "convert", "doctor"),
    ("server",),
    ("cli",),
)
TIER = {package: tier for tier, packages in enumerate(TIERS) for package in packages}


def module_name(path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in (ROOT / "mlxlm").rglob("*.py")}


def imports_of(name: str) -> set[str]:
    """Modules of mlxlm that `name` imports when it runs: anywhere in the file, but not for type checkers alone.

    What a package imports for type checkers it exports: see `mlxlm.utils.lazy_exports`.
    """
    imported = set()
    is_package = MODULES[name].name == "__init__.py"

    def add(target: str) -> None:
        while target not in MODULES:
            target = target.rpartition(".")[0]
        imported.add(target)

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not is_package:
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "mlxlm":
                    add(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "mlxlm":
            for alias in node.names:
                add(f"{node.module}.{alias.name}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    return imported - {name}


@cache
def imports() -> dict[str, set[str]]:
    """What each module imports; not while tests are collected, which every worker of pytest-xdist does."""
    return {name: imports_of(name) for name in MODULES}


def package(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def assert_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("imports make a cycle: " + " -> ".join(error.args[1]))


def test_no_loose_modules():
    assert {path.name for path in (ROOT / "mlxlm").glob("*.py")} == {"__init__.py"}
    assert {package(name) for name in MODULES} - {""} <= TIER.keys()


def test_packages_import_from_their_tier_and_below():
    upward = {
        f"{name} imports {target}"
        for name, targets in imports().items()
        for target in targets
        if package(name) and package(target) and TIER[package(target)] > TIER[package(name)]
    }
    assert not upward


def test_packages_make_no_cycle():
    graph = {name: set() for name in TIER}
    for name, targets in imports().items():
        if package(name):
            graph[package(name)] |= {package(target) for target in targets} - {package(name), ""}
    assert_no_cycle(graph)


def test_modules_make_no_cycle():
    # The root has no code that runs on import, but the BLAS and the version, which anything may import.
    assert_no_cycle({name: targets - {"mlxlm"} for name, targets in imports().items() if name != "mlxlm"})


def test_errors_import_nothing_of_mlxlm():
    assert not imports()["mlxlm.utils.errors"]


def test_modules_of_a_package_make_no_circle_even_for_type_checkers():
    graph: dict[str, set[str]] = {}
    for name, path in MODULES.items():
        nodes = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.ImportFrom)]
        found = {f"{n.module}.{alias.name}" for n in nodes for alias in n.names} | {n.module or "" for n in nodes}
        own = {target for target in found & MODULES.keys() if package(target) == package(name) and "." in target}
        graph[name] = {target for target in own - {name} if MODULES[target].name != "__init__.py"}
    assert_no_cycle(graph)
