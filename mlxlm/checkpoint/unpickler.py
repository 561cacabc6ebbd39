"""Read the tensor descriptions in a PyTorch pickle without running code from it.

Python's unpickler calls whatever a pickle names. This one only has the operations that `torch.save` writes for a
dictionary of tensors (pickle protocols 2 to 5, https://docs.python.org/3/library/pickletools.html), and knows a few
names, none of which it imports. It is a subclass of the unpickler in Python, which unlike the one in C doesn't
allocate memory for the largest index of its memo.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# A tensor needs about 70 reads, and no file in use has 10,000 tensors.
_MAX_READS = 700_000
_MAX_INT_KEY = 2**31  # optimizers number their parameters
_OPERATIONS = """PROTO MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
    EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET
    LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID REDUCE"""
_STORAGES = """FloatStorage HalfStorage BFloat16Storage DoubleStorage LongStorage IntStorage ShortStorage CharStorage
    ByteStorage BoolStorage"""
_DTYPES = "float32 float16 bfloat16 float64 int64 int32 int16 int8 uint8 bool"


class PickleError(Exception):
    """A pickle that is not a dictionary of tensors."""


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


def read_pickle(raw: bytes) -> Any:
    """Return dictionaries, lists, tuples, numbers and strings, with a `TensorView` for each tensor.

    Raises:
        PickleError: The pickle is malformed or has other contents.
    """
    try:
        return _Unpickler(_Reader(raw)).load()
    except PickleError:
        raise
    except EOFError:
        raise PickleError("it is cut off") from None
    except Exception as error:
        raise PickleError(f"it is malformed ({type(error).__name__})") from None


class _Reader(io.BytesIO):
    """The pickle, with a limit on the number of operations."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > _MAX_READS:
            raise PickleError(f"it needs more than {_MAX_READS} reads, more than any model")
        part = super().read(size)
        if len(part) != size:
            raise EOFError
        return part


class _Dict(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        # Hashing nested tuples can take forever, and many large integers share a hash.
        if type(key) is not str and not (type(key) is int and 0 <= key < _MAX_INT_KEY):
            raise TypeError
        super().__setitem__(key, value)


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        raise PickleError(f"it has operation {bytes([code])!r}, which no state_dict needs")


def _tensor(storage: Storage, offset: Any, shape: Any, strides: Any, *others: Any) -> TensorView:
    if type(storage) is not Storage:
        raise TypeError
    flags = others[2] if len(others) > 2 else None
    if isinstance(flags, dict) and any(flags.values()):  # "conj" and "neg": lazily conjugated or negated
        raise PickleError(f"a tensor has {', '.join(map(str, flags))} set (resolve_neg, resolve_conj)")
    return TensorView(storage, offset, shape, strides)


def _ordered_dict() -> _Dict:  # without arguments
    return _Dict()


# What REDUCE can call. Each returns one of its arguments or a new, small object.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *others: data,
    "torch.Size": lambda sizes: sizes,
    "collections.OrderedDict": _ordered_dict,
}


class _Unpickler(pickle._Unpickler):
    dispatch = _Operations(
        {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPERATIONS.split()}
        | {
            pickle.FRAME[0]: lambda unpickler: unpickler.read(8),
            pickle.EMPTY_DICT[0]: lambda unpickler: unpickler.append(_Dict()),
            pickle.BUILD[0]: lambda unpickler: unpickler.stack.pop(),  # attributes, as a state_dict's `_metadata`
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in (*_STORAGES.split(), *_DTYPES.split()):
            return name
        if (function := _FUNCTIONS.get(f"{module}.{name}")) is None:
            raise PickleError(f"it refers to {module}.{name}, and code in a file is never run")
        return function

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _device, numel = pid
        if kind != "storage" or storage not in _STORAGES.split() or type(key) is not str or type(numel) is not int:
            raise TypeError
        return Storage(storage, key, numel)
