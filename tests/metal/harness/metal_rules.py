"""Reports code that clang accepts but Metal's compiler rejects.

The rules are regular expressions on clang's -ast-dump, after template instantiation.
"""

from __future__ import annotations

import re

_POINTER = "a pointer or reference without an address space"
# Clang prints the four words after the lookahead in place of the name of an unnamed declaration. In a template, the
# pointee of `T* p` has no address space at all.
_DECLARED = re.compile(
    r" (?!used|referenced|implicit|invalid)[A-Za-z_]\w* '"
    r"(?:[^']*__generic |(?![^']*__(?:global|local|constant|private))[^']*[*&](?:const)?')"
)
_CAST = re.compile(r"^[^']*'[^']*__generic [^']*\*")
_RETURNED = re.compile(r"^(?!.* implicit )[^']*'(?:const |volatile )*__generic ")
_BFLOAT = "no implicit conversion from float to bfloat"
_METHOD = "a member function without an address space"
_VECTOR_CAST = "(T)x with a vector type T is not supported by the harness (write T(x))"
_VECTOR = re.compile(r"^[^']*(?:'[^']*':)?'[^'*&]*ext_vector_type[^'*&]*'")
# In OpenCL the result is a vector of 0 and -1.
_BOOLS = "vectors of bool are not supported by the harness"
_COMPARISON = re.compile(r"ext_vector_type.* '(?:[<>]=?|[=!]=|&&|\|\||!)'")
_ANY = re.compile("")

# Kind of AST node -> (error, pattern that the rest of the node's line must match).
RULES = {
    "VarDecl": [(_POINTER, _DECLARED)],
    "ParmVarDecl": [(_POINTER, _DECLARED)],
    "FieldDecl": [(_POINTER, _DECLARED)],
    "FunctionDecl": [(_POINTER, _RETURNED)],
    "CXXMethodDecl": [
        (_POINTER, _RETURNED),
        # Since MSL 4.1, `this` of an unqualified member function is not in the thread address space.
        (_METHOD, re.compile(r"^(?!.* (?:static|implicit) ).*\) (?:const )?__generic' ")),
    ],
    # In OpenCL, (float4)x reinterprets bits, and (float4)(a, b, c, d) constructs a vector.
    "CStyleCastExpr": [(_POINTER, _CAST), (_VECTOR_CAST, _VECTOR)],
    "CompoundLiteralExpr": [(_VECTOR_CAST, _VECTOR)],
    "CXXReinterpretCastExpr": [(_POINTER, _CAST)],
    "CXXStaticCastExpr": [(_POINTER, _CAST)],
    "CXXConstCastExpr": [(_POINTER, _CAST)],
    "CXXFunctionalCastExpr": [(_POINTER, _CAST)],
    "ImplicitCastExpr": [(_BFLOAT, re.compile(r"\b(?:__bf16|bfloat)\b[^<]*<FloatingCast>(?! part_of_explicit_cast)"))],
    # x += y with a bfloat x and a float y
    "CompoundAssignOperator": [(_BFLOAT, re.compile(r"\b(?:__bf16|bfloat)\b.* ComputeResultTy='float'"))],
    "BinaryOperator": [(_BOOLS, _COMPARISON)],
    "UnaryOperator": [(_BOOLS, _COMPARISON)],
    "ExtVectorElementExpr": [
        (
            "the names lo, hi, odd, even and s0 to sf of vector components are OpenCL's, not Metal's",
            re.compile(r" (?:lo|hi|odd|even|[sS][0-9a-fA-F]+)$"),
        )
    ],
    "LambdaExpr": [("a lambda expression", _ANY)],
    "DecompositionDecl": [("a structured binding", _ANY)],
    "GotoStmt": [("goto", _ANY)],
}
_NODE = re.compile(r"[ |`-]*(\w+) (0x[0-9a-f]+) (.*)")
# <file:line:column, ...>, <line:line:column, ...> or <col:column>. Omitted parts are as in the previous node.
_LOCATION = re.compile(r"(<[a-z -]+>|[^\s<>,]+):(\d+):\d+")


def violations(tree: str) -> list[str]:
    """Return one "file:line: error" per violation in the output of clang's -ast-dump."""
    errors, file, line, function = {}, "", 0, ""
    if kernel := re.search("<(?:header|signature):", tree):  # skip our standard library
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
            found.append("recursion")
        errors.update({f"{file}:{line}: {what}": None for what in found})
    return list(errors)
