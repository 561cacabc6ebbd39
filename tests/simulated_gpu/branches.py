"""Which branches of the code that only runs off the CPU were run by tests.

`python -m tests.simulated_gpu` prints them, after running the tests.

The code is found by its conditions: where `ON_CPU` is false, and what depends on `metal_available()` or
`is_available()`. It includes functions that are called only from there, and the files in `OFF_CPU_FILES`. Every
statement in it must run, and every condition must be both true and false, unless `metal_kernels/README.md` lists the
line with a reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "metal_kernels" / "README.md"
# Of mlxlm/kernels.
OFF_CPU_FILES = ("metal.py", "qk_norm_rope.py", "decode_attention.py", "flash_attention.py")
CALLS = ("metal_available", "is_available", "device_info", "set_wired_limit")
_LISTED = re.compile(r"^- `(mlxlm/[\w/]+\.py)`: `(.+?)`: ", re.MULTILINE)


@dataclass(frozen=True)
class Requirement:
    """Something that a test must do: run a statement, or make a condition true or false.

    Args:
        file: Path relative to the project.
        line: First line of the statement.
        text: Its first line.
        outcome: None to run the statement, else the value that its condition must have.
        test_lines: The lines of the condition.
        body_line: The line that follows if it is true.
    """

    file: str
    line: int
    text: str
    outcome: bool | None = None
    test_lines: range = range(0)
    body_line: int = 0

    def is_met(self, arcs: set[tuple[int, int]]) -> bool:
        """Whether it is met by these arcs, pairs of lines that ran one after the other."""
        if self.outcome is None:
            return any(self.line in arc for arc in arcs)
        leaving = {end for start, end in arcs if start in self.test_lines and end not in self.test_lines}
        return self.body_line in leaving if self.outcome else bool(leaving - {self.body_line})

    def __str__(self) -> str:
        what = "was not run" if self.outcome is None else f"was never {str(self.outcome).lower()}"
        return f"{self.file}:{self.line}: `{self.text}` {what}"


@dataclass
class Module:
    """The requirements of one file."""

    path: Path
    whole: bool = False
    requirements: list[Requirement] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = self.path.relative_to(ROOT).as_posix()
        source = self.path.read_text(encoding="utf-8")
        self.lines, self.tree = source.splitlines(), ast.parse(source)
        self.off_cpu: set[ast.AST] = set()  # statements that only run off the CPU
        self._visit(self.tree.body, self.whole)
        for function in () if self.whole else self._called_only_off_cpu():
            self._visit(function.body, True)
        self.requirements = list(dict.fromkeys(self.requirements))

    def _visit(self, statements: list[ast.stmt], off_cpu: bool) -> None:
        for statement in statements:
            if off_cpu and not _is_docstring(statement):
                self.off_cpu.update(ast.walk(statement))
                self._require(statement)
            if isinstance(statement, ast.If):
                value, depends = _value(statement.test), _depends(statement.test)
                if off_cpu or depends:
                    for outcome in (True, False):
                        if value in (None, outcome):
                            self._require(statement, outcome)
                self._visit(statement.body, off_cpu or (depends and _value(statement.test, on_cpu=True) is False))
                self._visit(statement.orelse, off_cpu or (depends and _value(statement.test, on_cpu=True) is True))
                ends = isinstance(statement.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
                off_cpu = off_cpu or (depends and ends and _value(statement.test, on_cpu=True) is True)
                continue
            expressions = () if hasattr(statement, "body") else ast.walk(statement)
            if any(_depends(node) for node in expressions if isinstance(node, ast.IfExp | ast.BoolOp)):
                self._require(statement)
            for block in ("body", "orelse", "finalbody"):
                self._visit(getattr(statement, block, []), off_cpu)
            for handler in getattr(statement, "handlers", []):
                self._visit(handler.body, off_cpu)

    def _require(self, statement: ast.stmt, outcome: bool | None = None) -> None:
        text = self.lines[statement.lineno - 1].strip()
        if outcome is None:
            self.requirements.append(Requirement(self.name, statement.lineno, text))
        else:
            test = statement.test
            lines = range(statement.lineno, test.end_lineno + 1)
            body = statement.body[0].lineno
            self.requirements.append(Requirement(self.name, statement.lineno, text, outcome, lines, body))

    def _called_only_off_cpu(self) -> Iterator[ast.FunctionDef]:
        """Private functions of the module whose name appears only in statements that only run off the CPU."""
        for function in self.tree.body:
            if isinstance(function, ast.FunctionDef) and function.name.startswith("_"):
                uses = [n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id == function.name]
                if uses and all(use in self.off_cpu or self._in_false_arm(use) for use in uses):
                    yield function

    def _in_false_arm(self, use: ast.Name) -> bool:
        """Whether a name is used in the part of `a if ON_CPU else b` that is for other devices."""
        choices = [node for node in ast.walk(self.tree) if isinstance(node, ast.IfExp)]
        values = [(node, _value(node.test, on_cpu=True)) for node in choices]
        return any(use in ast.walk(node.orelse if v else node.body) for node, v in values if v is not None)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _depends(node: ast.AST) -> bool:
    """Whether an expression asks which device there is."""
    names = {getattr(n, "id", getattr(n, "attr", None)) for n in ast.walk(node)}
    return not names.isdisjoint(("ON_CPU", *CALLS))


def _value(test: ast.expr, on_cpu: bool = False) -> bool | None:
    """The value of a condition on this kind of device, or None if it depends on more."""
    if isinstance(test, ast.Name | ast.Attribute) and getattr(test, "id", getattr(test, "attr", "")) == "ON_CPU":
        return on_cpu
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        value = _value(test.operand, on_cpu)
        return None if value is None else not value
    if isinstance(test, ast.BoolOp):
        values = [_value(part, on_cpu) for part in test.values]
        decisive = isinstance(test.op, ast.Or)
        if decisive in values:
            return decisive
        return None if None in values else not decisive
    if on_cpu and isinstance(test, ast.Call) and getattr(test.func, "id", getattr(test.func, "attr", "")) in CALLS:
        return False
    return None


def requirements() -> list[Requirement]:
    """Everything that tests must run."""
    found = []
    for path in sorted((ROOT / "mlxlm").rglob("*.py")):
        whole = path.parent.name == "kernels" and path.name in OFF_CPU_FILES
        found += Module(path, whole).requirements
    return found


def unmet(coverage_file: Path) -> tuple[list[Requirement], int]:
    """Return the requirements that no test met, without those that the README lists, and the number of all."""
    data = CoverageData(str(coverage_file))
    data.read()
    arcs: dict[str, set[tuple[int, int]]] = {}
    for file in data.measured_files():  # a child process may have run another copy of mlxlm
        arcs.setdefault(file[file.rindex("/mlxlm/") + 1 :], set()).update(data.arcs(file) or ())
    listed = set(_LISTED.findall(README.read_text(encoding="utf-8")))
    needed = requirements()
    return [r for r in needed if not r.is_met(arcs.get(r.file, set())) and (r.file, r.text) not in listed], len(needed)
