"""Reading pickled arrays without running arbitrary code.

The "python version" of CIFAR is pickled. A pickle can call anything it can name, so this reader resolves only the names
that NumPy's own pickles use to rebuild an array, and to placeholders of ours: what is called with a file's arguments,
and given a file's state, never is NumPy itself, whose objects a crafted file could put into a state that crashes. The
arrays are made at the end, of bytes, by ourselves. Lists, dicts, strings, bytes and numbers need no names.
"""

import pickle
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

#: The types of numbers that arrays of images and labels have, as pickles name them.
TYPES = ("u1", "i1", "b1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")


def latin1_bytes(text: str, encoding: str) -> bytes:
    """Protocol 2 writes bytes as ``_codecs.encode(text, "latin1")``; no other codec is allowed."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the codec {encoding!r} is not allowed")
    return text.encode("latin-1")


class DType:
    """Stands for ``numpy.dtype(name, False, True)``, with a state whose second entry is the byte order."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name.decode("latin-1") if isinstance(name, bytes) else name
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        self.order = "=" if order == "|" else order

    def numpy(self) -> "np.dtype[Any]":
        name = self.name.lstrip("<>=|") if isinstance(self.name, str) else ""
        if name not in TYPES or self.order not in ("<", ">", "="):
            raise pickle.UnpicklingError(f"arrays of {self.name!r} are not allowed")
        return np.dtype(name).newbyteorder(self.order)  # type: ignore[arg-type]


class Array:
    """Stands for an array: its shape, numbers and memory order, until `numpy` makes one of them."""

    content: tuple[Any, Any, Any, bool] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, by_columns, data = state
        self.content = data, dtype, shape, bool(by_columns)

    def numpy(self) -> "np.ndarray[Any, Any]":
        if self.content is None:
            return np.empty(0)
        data, dtype, shape, by_columns = self.content
        if isinstance(data, str):
            data = data.encode("latin-1")
        sound = isinstance(data, bytes | bytearray) and isinstance(dtype, DType) and isinstance(shape, tuple)
        if not sound or not all(isinstance(side, int) and side >= 0 for side in shape):
            raise pickle.UnpicklingError("it has an array without numbers")
        kind = dtype.numpy()
        if prod(shape) * kind.itemsize != len(data):
            raise pickle.UnpicklingError(f"{len(data)} bytes are no array of shape {shape}")
        flat = np.frombuffer(bytes(data), kind)
        return flat.reshape(shape, order="F" if by_columns else "C").copy()


def from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> Array:
    """An array of protocol 5."""
    array = Array()
    array.content = data, dtype, shape, order == "F"
    return array


class Name:
    """What a pickle gets for a name: something to call, and nothing to change."""

    __slots__ = ("_meaning",)

    def __init__(self, meaning: Callable[..., Any]) -> None:
        self._meaning = meaning

    def __call__(self, *arguments: Any) -> Any:
        return self._meaning(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes what a name means")


ALLOWED = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Name(lambda *_: Array()) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): Name(from_buffer) for core in ("core", "_core")},
    ("numpy", "ndarray"): Name(Array),
    ("numpy", "dtype"): Name(DType),
    ("_codecs", "encode"): Name(latin1_bytes),
}


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that knows arrays and plain containers only."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which an array does not need") from None


def filled(content: Any) -> Any:
    """Plain containers with the arrays in place of what stands for them."""
    if isinstance(content, Array):
        return content.numpy()
    if isinstance(content, dict):
        return {key: filled(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(filled(value) for value in content)
    if content is None or isinstance(content, bool | int | float | str | bytes):
        return content
    raise pickle.UnpicklingError(f"it holds a {type(content).__name__}, which is no array")


def load_arrays(path: Path) -> Any:
    """The content of a pickle of arrays and plain containers; a `ValueError` that names the file otherwise."""
    try:
        with path.open("rb") as file:
            return filled(ArrayUnpickler(file, encoding="bytes").load())
    # A damaged pickle can fail in many ways, none of them the caller's fault.
    except Exception as error:
        raise ValueError(f"{path} is not a readable pickle of arrays: {error}.") from error
