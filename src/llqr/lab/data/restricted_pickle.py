"""Reading pickled arrays without running arbitrary code.

The "python version" of CIFAR is pickled. A pickle can call anything it can name, so this reader only resolves the names
that rebuild a NumPy array; lists, dicts, strings, bytes and numbers need no names.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

# The functions that NumPy's own pickles name to rebuild an array, before and since protocol 5.
RECONSTRUCT = np.empty(0).__reduce__()[0]
FROM_BUFFER = np.empty(0).__reduce_ex__(5)[0]


def latin1_bytes(text: str, encoding: str) -> bytes:
    """Protocol 2 writes bytes as ``_codecs.encode(text, "latin1")``; no other codec is allowed."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"the codec {encoding!r} is not allowed")
    return text.encode("latin-1")


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): RECONSTRUCT,
    ("numpy.core.numeric", "_frombuffer"): FROM_BUFFER,
    ("numpy._core.numeric", "_frombuffer"): FROM_BUFFER,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): latin1_bytes,
}


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that rebuilds arrays and plain containers only."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which an array does not need") from None


def load_arrays(path: Path) -> Any:
    """The content of a pickle of arrays and plain containers; a `ValueError` that names the file otherwise."""
    try:
        with path.open("rb") as file:
            return ArrayUnpickler(file, encoding="bytes").load()
    # A damaged pickle can fail in many ways, none of them the caller's fault.
    except Exception as error:
        raise ValueError(f"{path} is not a readable pickle of arrays: {error}.") from error
