"""What Metal's compiler refuses and clang takes, found in clang's syntax tree of the instantiated kernel.

The rules that only the text shows are in translate.py.
"""

from __future__ import annotations

import re

_POINTER = "a pointer or reference without an address space"
# These four words stand where an unnamed declaration has its name.
# A template's `T* p` has no address space at all: it would come with T.
_DECLARED = re.compile(
    r" (?!used|referenced|implicit|invalid)[A-Za-z_]\w* '"
    r"(?:[^']*__generic |(?![^']*__(?:global|local|constant|private))[^']*[*&](?:const)?')"
)
_CAST = re.compile(r"^[^']*'[^']*__generic [^']*\*")
_RETURNED = re.compile(r"^(?!.* implicit )[^']*'(?:const |volatile )*__generic ")
_BFLOAT = "no implicit conversion from float to bfloat"
_METHOD = "a member function that does not say where its object lies"
_VECTOR_CAST = "(T)x with a vector T: the harness knows T(x)"
_VECTOR = re.compile(r"^[^']*(?:'[^']*':)?'[^'*&]*ext_vector_type[^'*&]*'")
# In OpenCL the result is a vector of 0 and -1.
_BOOLS = "the harness has no vectors of bool"
_COMPARISON = re.compile(r"ext_vector_type.* '(?:[<>]=?|[=!]=|&&|\|\||!)'")
_ANY = re.compile("")

# Kind of node -> what is wrong with it, and where the rest of its line shows that.
RULES = {
    "VarDecl": [(_POINTER, _DECLARED)],
    "ParmVarDecl": [(_POINTER, _DECLARED)],
    "FieldDecl": [(_POINTER, _DECLARED)],
    "FunctionDecl": [(_POINTER, _RETURNED)],
    "CXXMethodDecl": [
        (_POINTER, _RETURNED),
        # MSL 4.1 no longer takes `this` to be in thread memory.
        (_METHOD, re.compile(r"^(?!.* (?:static|implicit) ).*\) (?:const )?__generic' ")),
    ],
    # OpenCL reinterprets the bits of a vector where Metal converts, and (float4)(a, b, c, d) is a list.
    "CStyleCastExpr": [(_POINTER, _CAST), (_VECTOR_CAST, _VECTOR)],
    "CompoundLiteralExpr": [(_VECTOR_CAST, _VECTOR)],
    "CXXReinterpretCastExpr": [(_POINTER, _CAST)],
    "CXXStaticCastExpr": [(_POINTER, _CAST)],
    "CXXConstCastExpr": [(_POINTER, _CAST)],
    "CXXFunctionalCastExpr": [(_POINTER, _CAST)],
    "ImplicitCastExpr": [(_BFLOAT, re.compile(r"\b(?:__bf16|bfloat)\b[^<]*<FloatingCast>(?! part_of_explicit_cast)"))],
    # x += y, which computes in float where y is one and then converts
    "CompoundAssignOperator": [(_BFLOAT, re.compile(r"\b(?:__bf16|bfloat)\b.* ComputeResultTy='float'"))],
    "BinaryOperator": [(_BOOLS, _COMPARISON)],
    "UnaryOperator": [(_BOOLS, _COMPARISON)],
    "ExtVectorElementExpr": [
        ("OpenCL's names for parts of a vector", re.compile(r" (?:lo|hi|odd|even|[sS][0-9a-fA-F]+)$"))
    ],
    "LambdaExpr": [("no lambdas", _ANY)],
    "DecompositionDecl": [("no structured bindings", _ANY)],
    "GotoStmt": [("no goto", _ANY)],
}
_NODE = re.compile(r"[ |`-]*(\w+) (0x[0-9a-f]+) (.*)")
# <file:line:column, ...>, <line:line:column, ...> or <col:column>: what a node does not say is as in the node before.
_LOCATION = re.compile(r"(<[a-z -]+>|[^\s<>,]+):(\d+):\d+")


def audit(tree: str) -> list[str]:
    """One line per offence in the output of clang's -ast-dump: file:line: what is wrong."""
    offences, file, line, function = {}, "", 0, ""
    if kernel := re.search("<(?:header|signature):", tree):  # the library comes first: skip it
        tree = tree[tree.rfind("\n", 0, kernel.start()) + 1 :]
    for node in tree.splitlines():
        if not (parts := _NODE.match(node)):
            continue
        kind, address, rest = parts.groups()
        for where, number in _LOCATION.findall(rest.split(" '", 1)[0]):
            file, line = file if where == "line" else where, int(number)
        found = [what for what, rule in RULES.get(kind, ()) if rule.search(rest)]
        if kind in ("FunctionDecl", "CXXMethodDecl"):
            function = address
        elif kind in ("DeclRefExpr", "MemberExpr") and f" {function}" in rest and function:
            found.append("no recursion")
        offences.update({f"{file}:{line}: {what}": None for what in found})
    return list(offences)
