"""Reading pickled arrays without running arbitrary code.

The "python version" of CIFAR is pickled. A pickle can call anything it can name, so this reader knows only the names
that NumPy's own pickles use to rebuild an array, and runs none of them: it writes down what they are called with, and
the state that is given to the result. NumPy's own objects, which a crafted file could put into a state that crashes,
never get one. The arrays are made at the end, of bytes, by ourselves. Lists, dicts, strings, bytes and numbers need no
names.
"""

import pickle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

#: What is meant by the names that are known.
NAMES = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): "array" for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): "buffer" for core in ("core", "_core")},
    ("numpy", "ndarray"): "array",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "bytes",
}
#: The types of numbers that arrays of images and labels have, as pickles name them.
TYPES = ("u1", "i1", "b1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8")


class Recorded:
    """What a pickle gets for a name and, once that is called, for its result."""

    __slots__ = ("arguments", "meaning", "state")

    def __init__(self, meaning: str, arguments: tuple[Any, ...] | None = None) -> None:
        self.meaning, self.arguments = meaning, arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> "Recorded":
        return Recorded(self.meaning, arguments)

    def __setstate__(self, state: Any) -> None:
        if self.arguments is None:
            raise pickle.UnpicklingError("it changes what a name means")
        self.state = state


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that knows arrays and plain containers only."""

    def find_class(self, module: str, name: str) -> Recorded:
        if (module, name) not in NAMES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which an array does not need")
        return Recorded(NAMES[module, name])


def made(content: Any) -> Any:
    """Plain containers with arrays and bytes in the place of what was recorded for them."""
    if isinstance(content, dict):
        return {made(key): made(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return type(content)(made(value) for value in content)
    if content is None or isinstance(content, bool | int | float | str | bytes):
        return content
    called = isinstance(content, Recorded) and content.arguments is not None
    if called and content.meaning == "bytes":
        text, encoding = content.arguments
        if encoding not in ("latin1", "latin-1"):
            raise pickle.UnpicklingError(f"the codec {encoding!r} is not allowed")
        return text.encode("latin-1")
    if called and content.meaning == "buffer":  # an array of protocol 5
        data, dtype, shape, order = content.arguments
        return array_of(data, dtype, shape, order == "F")
    if called and content.meaning == "array":
        if content.state is None:
            return np.empty(0)
        _, shape, dtype, by_columns, data = content.state
        return array_of(made(data), dtype, shape, bool(by_columns))
    held = ("name", content.meaning)[called] if isinstance(content, Recorded) else type(content).__name__
    raise pickle.UnpicklingError(f"it holds a {held}, which is no array")


def array_of(data: Any, dtype: Any, shape: Any, by_columns: bool) -> "np.ndarray[Any, Any]":
    if isinstance(data, str):
        data = data.encode("latin-1")
    sound = isinstance(data, bytes | bytearray) and isinstance(dtype, Recorded) and isinstance(shape, tuple)
    if not sound or not all(isinstance(side, int) and side >= 0 for side in shape):
        raise pickle.UnpicklingError("it has an array without numbers")
    kind = dtype_of(dtype)
    if prod(shape) * kind.itemsize != len(data):
        raise pickle.UnpicklingError(f"{len(data)} bytes are no array of shape {shape}")
    return np.frombuffer(bytes(data), kind).reshape(shape, order="F" if by_columns else "C").copy()


def dtype_of(recorded: Recorded) -> "np.dtype[Any]":
    """Of ``numpy.dtype(name, False, True)``, with a state whose second entry is the byte order."""
    words = (*(recorded.arguments or ("",))[:1], "=" if recorded.state is None else recorded.state[1])
    name, order = (word.decode("latin-1") if isinstance(word, bytes) else word for word in words)
    plain = name.lstrip("<>=|") if isinstance(name, str) and recorded.meaning == "dtype" else ""
    if plain not in TYPES or order not in ("<", ">", "=", "|"):
        raise pickle.UnpicklingError(f"arrays of {name!r} are not allowed")
    return np.dtype(plain).newbyteorder("=" if order == "|" else order)  # type: ignore[arg-type]  # one of three


def load_arrays(path: Path) -> Any:
    """The content of a pickle of arrays and plain containers; a `ValueError` that names the file otherwise."""
    try:
        with path.open("rb") as file:
            return made(ArrayUnpickler(file, encoding="bytes").load())
    # A damaged pickle can fail in many ways, none of them the caller's fault.
    except Exception as error:
        raise ValueError(f"{path} is not a readable pickle of arrays: {error}.") from error
