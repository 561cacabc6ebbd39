"""Reports code that clang accepts but Metal's compiler rejects.

The rules are regular expressions on clang's -ast-dump, after template instantiation.
"""

from __future__ import annotations

import re

_POINTER = "a pointer or reference without an address space"
# A name and its type. Clang prints the four words after the lookahead in place of the name of an unnamed declaration.
_NAMED = r" (?!used|referenced|implicit|invalid)[A-Za-z_]\w* '"
# Metal accepts parameters like `device T*& p`.
_DECLARED = re.compile(_NAMED + r"(?![^'*&]*__(?!generic)[^'*&]*\*__generic &)[^']*__generic ")
# In a template, the pointee of `T* p` has no address space at all. Metal accepts parameters like `T p[N]`, which don't
# end with the name.
_PLAIN = r"(?![^']*__(?:global|local|constant|private))[^']*[*&](?:const)?'"
_DEPENDENT = re.compile(_NAMED + _PLAIN)
_PARAMETER = re.compile(r":(\d+)> \S*:\1(?: used| referenced)?" + _NAMED + _PLAIN)
_CAST = re.compile(r"^[^']*'[^']*__generic [^']*\*")
_RETURNED = re.compile(r"^(?!.* implicit )[^']*'(?:const |volatile )*__generic ")
_BFLOAT = "no implicit conversion from float to bfloat"
_METHOD = "a member function without an address space"
_VECTOR_CAST = "(T)x with a vector type T is not supported by the harness (write T(x))"
_VECTOR = re.compile(r"^[^']*(?:'[^']*':)?'[^'*&]*ext_vector_type[^'*&]*'")
# In OpenCL the result is a vector of 0 and -1, and not bool4.
_BOOLS = "a comparison of vectors is not supported by the harness"
_COMPARISON = re.compile(r"ext_vector_type.* '(?:[<>]=?|[=!]=|&&|\|\||!)'")
# vec<T, N> where N is not 2, 3 or 4
_SIZE = ("a vector of less than two or more than four elements", re.compile(r"ext_vector_type\((?![234]\))"))
_ANY = re.compile("")

# Kind of AST node -> (error, pattern that the rest of the node's line must match).
RULES = {
    "VarDecl": [(_POINTER, _DECLARED), (_POINTER, _DEPENDENT), _SIZE],
    "ParmVarDecl": [(_POINTER, _DECLARED), (_POINTER, _PARAMETER), _SIZE],
    "FieldDecl": [(_POINTER, _DECLARED), (_POINTER, _DEPENDENT), _SIZE],
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
    "CXXNoexceptExpr": [("the noexcept operator", _ANY)],
    # Of C++17, Metal's compiler accepts what clang accepts in C++14, such as if constexpr. MLX's own kernels use it.
    "CXXDeductionGuideDecl": [("a class template without its arguments, which needs C++17", _ANY)],
    "NonTypeTemplateParmDecl": [("template <auto>, which needs C++17", re.compile(r"'auto'"))],
}
# Kind of AST node -> (error, pattern of the rest of its line, pattern of its first child).
FIRST_CHILD = {
    "ConditionalOperator": ("a vector before ?:", _ANY, _VECTOR),
    "ImplicitCastExpr": (
        "no implicit conversion from bfloat to half",
        re.compile(r"[^']*'half' <FloatingCast>(?! part_of_explicit_cast)"),
        re.compile(r"[^']*'[^'*&]*(?:__bf16|bfloat)'"),
    ),
}
_NODE = re.compile(r"[ |`-]*(\w+) (0x[0-9a-f]+) (.*)")
# <file:line:column, ...>, <line:line:column, ...> or <col:column>. Omitted parts are as in the previous node.
_LOCATION = re.compile(r"(<[a-z -]+>|[^\s<>,]+):(\d+):\d+")
_IN_KERNEL = re.compile(r"<(?!line:|col:)[\w.-]+:\d+:\d+")  # not in our standard library, which has a path


_PREVIOUS = re.compile(r"(?:parent \w+ )?prev (0x[0-9a-f]+)")
_CALLEE = re.compile(r"(?:Function|CXXMethod|->\S+|\.\S+) (0x[0-9a-f]+)")


def violations(tree: str) -> list[str]:
    """Return one "file:line: error" per violation in the output of clang's -ast-dump."""
    errors, file, line, function = {}, "", 0, ""
    above: dict[int, str] = {}  # the last node of each depth
    last = body = -2  # depth of the last node, and of the function
    declared: dict[str, str] = {}  # the first declaration of a function
    calls: dict[str, dict[str, str]] = {}  # where a function calls which others
    if kernel := _IN_KERNEL.search(tree):  # skip our standard library
        tree = tree[tree.rfind("\n", 0, kernel.start()) + 1 :]
    for node in tree.splitlines():
        if not (parts := _NODE.match(node)):
            continue
        kind, address, rest = parts.groups()
        depth = parts.start(1)
        above[depth] = f"{kind} {rest}"
        for where, number in _LOCATION.findall(rest.split(" '", 1)[0]):
            file, line = file if where == "line" else where, int(number)
        found = [what for what, rule in RULES.get(kind, ()) if rule.search(rest)]
        if depth == last + 2:
            parent, of = above[last].split(" ", 1)
            if parent in FIRST_CHILD:
                what, rule, child = FIRST_CHILD[parent]
                if rule.match(of) and child.match(above[depth]):
                    found.append(what)
        last = depth
        if kind in ("FunctionDecl", "CXXMethodDecl"):
            previous = _PREVIOUS.match(rest)
            function = declared[address] = declared.get(previous[1], previous[1]) if previous else address
            body = depth
        elif depth <= body:
            function = ""
        elif kind in ("DeclRefExpr", "MemberExpr") and (callee := _CALLEE.search(rest)):
            calls.setdefault(function, {})[declared.get(callee[1], callee[1])] = f"{file}:{line}"
        if "/" not in file:  # else a template of our standard library, instantiated by the kernel
            errors.update({f"{file}:{line}: {what}": None for what in found})
    return list(errors) + _recursions(calls)


def _recursions(calls: dict[str, dict[str, str]]) -> list[str]:
    """Where functions call themselves, directly or through others."""
    found = []
    for function in filter(None, calls):
        reached, waiting = set(), [function]
        while waiting:
            for callee, where in calls.get(waiting.pop(), {}).items():
                if callee == function:
                    found.append(f"{where}: recursion")
                elif callee not in reached:
                    reached.add(callee)
                    waiting.append(callee)
    return found
