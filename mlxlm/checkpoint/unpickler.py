"""What a pickle of PyTorch's says about tensors, read by an interpreter that has no way to run code.

Python's own unpickler calls whatever a pickle names. This one knows the operations that `torch.save` writes for
a dictionary of tensors (pickle protocols 2 to 5, https://docs.python.org/3/library/pickletools.html), makes plain
descriptions of them, and refuses every other operation and name.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class PickleError(Exception):
    """A pickle that is not a dictionary of tensors; the text says why."""


@dataclass(frozen=True)
class Name:
    """An object of a module that the pickle refers to: `torch._utils._rebuild_tensor_v2`. Nothing is imported."""

    text: str


@dataclass(frozen=True)
class Storage:
    """A block of numbers in a record of its own."""

    kind: str  # "BFloat16Storage"
    key: str
    numel: int


@dataclass(frozen=True)
class TensorView:
    """A tensor: part of a storage. Sizes and strides count elements; nothing is checked yet."""

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
_KNOWN = _STORAGES | _DTYPES | {_REBUILD, _PARAMETER, _ORDERED, _SIZE}
_LARGEST_KEY = 2**31  # of numbers: optimizers count parameters

# A tensor takes about 40 operations, and no file in use has 10,000 of them.
_MAX_OPERATIONS = 500_000
_MARK = object()


def read_pickle(raw: bytes) -> Any:
    """Dictionaries, lists, tuples, numbers and texts, with `TensorView`s for tensors. Raises PickleError."""
    machine = _Machine(raw)
    try:
        return machine.run()
    except (IndexError, struct.error):
        raise PickleError("it is cut off or malformed") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PickleError(f"it is malformed ({type(error).__name__})") from None


class _Machine:
    """The stack and memory of a pickle being read."""

    def __init__(self, raw: bytes) -> None:
        self.raw, self.at = raw, 0
        self.stack: list[Any] = []
        self.memory: dict[int, Any] = {}

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
        part = self.raw[self.at : self.at + count]
        if len(part) < count:
            raise IndexError
        self.at += count
        return part

    def number(self, format: str) -> int:
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def line(self) -> str:
        end = self.raw.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1].decode("utf-8")

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:  # an IndexError where there is none
            at -= 1
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def text(self, format: str) -> None:
        self.push(self.take(self.number(format)).decode("utf-8"))

    def name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full not in _KNOWN:
            raise PickleError(f"it names {full}, and code in a file is never run")
        self.push(Name(full))

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
        # The hash of nested tuples can take for ever, and many large numbers have the same one.
        if any(type(key) is not str and not (type(key) is int and 0 <= key < _LARGEST_KEY) for key in values[::2]):
            raise TypeError
        target.update(zip(values[::2], values[1::2], strict=True))

    def build(self) -> None:
        """An object's attributes: a state_dict has `_metadata`, which says nothing about tensors."""
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
            marks = arguments[6] if len(arguments) > 6 else None
            if isinstance(marks, dict) and any(marks.values()):  # "conj" and "neg": the numbers mean others
                raise PickleError(f"a tensor is marked {', '.join(map(str, marks))} (resolve_neg, resolve_conj)")
            self.push(TensorView(storage, offset, shape, strides))
        elif type(arguments[0] if arguments else None) is {_PARAMETER: TensorView, _SIZE: tuple}.get(name, object):
            self.push(arguments[0])
        elif name == _ORDERED and arguments == ():
            self.push({})
        else:
            raise TypeError


def _at(index: Callable[[_Machine], int], store: bool) -> Callable[[_Machine], None]:
    """To or from the memory, at the index that follows."""

    def put(machine: _Machine) -> None:
        machine.memory[index(machine)] = machine.stack[-1]

    def get(machine: _Machine) -> None:
        machine.push(machine.memory[index(machine)])

    return put if store else get


_OPERATIONS: dict[bytes, Callable[[_Machine], Any]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: lambda m: m.push(_MARK),
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.BININT: lambda m: m.push(m.number("<i")),
    pickle.BININT1: lambda m: m.push(m.number("<B")),
    pickle.BININT2: lambda m: m.push(m.number("<H")),
    pickle.LONG1: _Machine.long1,
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
    pickle.BINPUT: _at(lambda m: m.number("<B"), store=True),
    pickle.LONG_BINPUT: _at(lambda m: m.number("<I"), store=True),
    pickle.MEMOIZE: _at(lambda m: len(m.memory), store=True),
    pickle.BINGET: _at(lambda m: m.number("<B"), store=False),
    pickle.LONG_BINGET: _at(lambda m: m.number("<I"), store=False),
    pickle.GLOBAL: lambda m: m.name(m.line(), m.line()),
    pickle.STACK_GLOBAL: _Machine.stack_global,
    pickle.BINPERSID: _Machine.persistent,
    pickle.REDUCE: _Machine.reduce,
    pickle.BUILD: _Machine.build,
}
