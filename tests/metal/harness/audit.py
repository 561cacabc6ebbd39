"""What Metal's compiler refuses and clang takes, found in clang's syntax tree of the instantiated kernel.

The rules that only the text shows are in translate.py.
"""

from __future__ import annotations

import re

RULES = {
    "no implicit conversion from float to bfloat": re.compile(
        r"ImplicitCastExpr .*\b(?:__bf16|bfloat)\b[^<]*<FloatingCast>(?! part_of_explicit_cast)"
        # x += y, which computes in float where y is one and then converts
        r"|CompoundAssignOperator .*\b(?:__bf16|bfloat)\b.* ComputeResultTy='float'"
    ),
    # These four words stand where an unnamed declaration has its name.
    "a pointer or reference without an address space": re.compile(
        r"(?:Var|ParmVar|Field)Decl .* (?!used|referenced|implicit|invalid)[A-Za-z_]\w* '[^']*__generic "
    ),
    # MSL 4.1 no longer takes `this` to be in thread memory.
    "a member function that does not say where its object lies": re.compile(
        r"CXXMethodDecl (?!.* (?:static|implicit) ).*\) (?:const )?__generic' "
    ),
    "no lambdas": re.compile("LambdaExpr "),
    "no structured bindings": re.compile("DecompositionDecl "),
}
# <file:line:column, ...>, <line:line:column, ...> or <col:column>: what a node does not say is as in the node before.
_LOCATION = re.compile(r"(<[a-z -]+>|[^\s<>,]+):(\d+):\d+")


def audit(tree: str) -> list[str]:
    """One line per offence in the output of clang's -ast-dump: file:line: what is wrong."""
    offences, file, line = {}, "", 0
    for node in tree.splitlines():
        for where, number in _LOCATION.findall(node.split(" '", 1)[0]):
            file, line = file if where == "line" else where, int(number)
        for what, rule in RULES.items():
            if rule.search(node):
                offences[f"{file}:{line}: {what}"] = None
    return list(offences)
