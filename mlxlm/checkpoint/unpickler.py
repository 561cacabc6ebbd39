"""Read the tensor descriptions in a PyTorch pickle with an interpreter that can't run code.

Python's unpickler calls whatever a pickle names. This one only knows the operations that `torch.save` writes for a
dictionary of tensors (pickle protocols 2 to 5, https://docs.python.org/3/library/pickletools.html), and raises for
every other operation and name.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class PickleError(Exception):
    """A pickle that is not a dictionary of tensors."""


@dataclass(frozen=True)
class GlobalName:
    """A global that the pickle refers to, such as `torch._utils._rebuild_tensor_v2`. Nothing is imported."""

    text: str


@dataclass(frozen=True)
class Storage:
    """A PyTorch storage, in the record `key`."""

    kind: str  # "BFloat16Storage"
    key: str
    numel: int


@dataclass(frozen=True)
class TensorView:
    """A tensor: a view of a storage. Shape and strides count elements and are not checked yet."""

    storage: Storage
    offset: Any
    shape: Any
    strides: Any


_STORAGES = {
    f"torch.{kind}Storage"
    for kind in ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
}
_REBUILD = "torch._utils._rebuild_tensor_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_ORDERED = "collections.OrderedDict"
_SIZE = "torch.Size"
_DTYPES = {
    f"torch.{kind}"
    for kind in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_ALLOWED = _STORAGES | _DTYPES | {_REBUILD, _PARAMETER, _ORDERED, _SIZE}
_MAX_INT_KEY = 2**31  # optimizers number their parameters

# A tensor needs about 40 operations, and no file in use has 10,000 tensors.
_MAX_OPERATIONS = 500_000
_MARK = object()


def read_pickle(raw: bytes) -> Any:
    """Return dictionaries, lists, tuples, numbers and strings, with a `TensorView` for each tensor.

    Raises:
        PickleError: The pickle is malformed or has other contents.
    """
    unpickler = _Unpickler(raw)
    try:
        return unpickler.run()
    except (IndexError, struct.error):
        raise PickleError("it is cut off or malformed") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PickleError(f"it is malformed ({type(error).__name__})") from None


class _Unpickler:
    """The interpreter: the stack and the memo of a pickle."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.position = raw, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(_MAX_OPERATIONS):
            code = self.take(1)
            if code == pickle.STOP:
                return self.stack.pop()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise PickleError(f"it has operation {code!r}, which no state_dict needs")
            operation(self)
        raise PickleError(f"it has more than {_MAX_OPERATIONS} operations")

    def take(self, count: int) -> bytes:
        part = self.raw[self.position : self.position + count]
        if len(part) < count:
            raise IndexError
        self.position += count
        return part

    def number(self, format: str) -> int:
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def line(self) -> str:
        end = self.raw.index(b"\n", self.position)
        return self.take(end + 1 - self.position)[:-1].decode("utf-8")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        mark = len(self.stack) - 1
        while self.stack[mark] is not _MARK:  # IndexError if there is none
            mark -= 1
        values = self.stack[mark + 1 :]
        del self.stack[mark:]
        return values

    def text(self, format: str) -> None:
        self.push(self.take(self.number(format)).decode("utf-8"))

    def name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in _ALLOWED:
            raise PickleError(f"it refers to {full}, and code in a file is never run")
        self.push(GlobalName(full))

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError
        self.name(module, name)

    def long1(self) -> None:
        self.push(int.from_bytes(self.take(self.number("<B")), "little", signed=True))

    def tuple_of(self, count: int) -> None:
        if len(self.stack) < count:
            raise IndexError
        values = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.push(values)

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(values) % 2:
            raise TypeError
        # Hashing nested tuples can take forever, and many large integers share a hash.
        if any(type(key) is not str and not (type(key) is int and 0 <= key < _MAX_INT_KEY) for key in values[::2]):
            raise TypeError
        target.update(zip(values[::2], values[1::2], strict=True))

    def build(self) -> None:
        """Drop an object's attributes, such as the `_metadata` of a state_dict."""
        self.stack.pop()
        if type(self.stack[-1]) is not dict:
            raise TypeError

    def persistent(self) -> None:
        kind, storage, key, _device, numel = self.stack.pop()
        if kind != "storage" or storage.text not in _STORAGES or type(key) is not str or type(numel) is not int:
            raise TypeError
        self.push(Storage(storage.text.removeprefix("torch."), key, numel))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        name = function.text
        if name == _REBUILD:
            storage, offset, shape, strides = arguments[:4]
            if type(storage) is not Storage:
                raise TypeError
            flags = arguments[6] if len(arguments) > 6 else None
            if isinstance(flags, dict) and any(flags.values()):  # "conj" and "neg": lazily conjugated or negated
                raise PickleError(f"a tensor has {', '.join(map(str, flags))} set (resolve_neg, resolve_conj)")
            self.push(TensorView(storage, offset, shape, strides))
        elif type(arguments[0] if arguments else None) is {_PARAMETER: TensorView, _SIZE: tuple}.get(name, object):
            self.push(arguments[0])
        elif name == _ORDERED and arguments == ():
            self.push({})
        else:
            raise TypeError


def _memo(index: Callable[[_Unpickler], int], store: bool) -> Callable[[_Unpickler], None]:
    """Store the top of the stack in the memo, or push from it, at the index that follows."""

    def put(unpickler: _Unpickler) -> None:
        unpickler.memo[index(unpickler)] = unpickler.stack[-1]

    def get(unpickler: _Unpickler) -> None:
        unpickler.push(unpickler.memo[index(unpickler)])

    return put if store else get


_OPERATIONS: dict[bytes, Callable[[_Unpickler], Any]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: lambda m: m.push(_MARK),
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.BININT: lambda m: m.push(m.number("<i")),
    pickle.BININT1: lambda m: m.push(m.number("<B")),
    pickle.BININT2: lambda m: m.push(m.number("<H")),
    pickle.LONG1: _Unpickler.long1,
    pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    pickle.BINUNICODE: lambda m: m.text("<I"),
    pickle.SHORT_BINUNICODE: lambda m: m.text("<B"),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_to_mark())),
    pickle.TUPLE1: lambda m: m.tuple_of(1),
    pickle.TUPLE2: lambda m: m.tuple_of(2),
    pickle.TUPLE3: lambda m: m.tuple_of(3),
    pickle.APPEND: lambda m: m.append([m.stack.pop()]),
    pickle.APPENDS: lambda m: m.append(m.pop_to_mark()),
    pickle.SETITEM: lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    pickle.SETITEMS: lambda m: m.set_items(m.pop_to_mark()),
    pickle.BINPUT: _memo(lambda m: m.number("<B"), store=True),
    pickle.LONG_BINPUT: _memo(lambda m: m.number("<I"), store=True),
    pickle.MEMOIZE: _memo(lambda m: len(m.memo), store=True),
    pickle.BINGET: _memo(lambda m: m.number("<B"), store=False),
    pickle.LONG_BINGET: _memo(lambda m: m.number("<I"), store=False),
    pickle.GLOBAL: lambda m: m.name(m.line(), m.line()),
    pickle.STACK_GLOBAL: _Unpickler.stack_global,
    pickle.BINPERSID: _Unpickler.persistent,
    pickle.REDUCE: _Unpickler.reduce,
    pickle.BUILD: _Unpickler.build,
}
