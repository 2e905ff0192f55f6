"""Reading pickled arrays without running what a pickle may ask for.

The "python version" of CIFAR is pickled. A pickle can call anything it can name, so this reader lets it name only
what rebuilds a NumPy array: lists, dicts, strings, bytes and numbers need no name at all.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

# What NumPy itself names to rebuild an array, before and since pickle protocol 5.
RECONSTRUCT = np.empty(0).__reduce__()[0]
FROM_BUFFER = np.empty(0).__reduce_ex__(5)[0]


def latin1_bytes(text: str, encoding: str) -> bytes:
    """What protocol 2 writes for bytes: ``_codecs.encode(text, "latin1")``; no other codec is let through."""
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
    """An unpickler that can rebuild arrays and plain containers, and nothing else."""

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
    # A damaged pickle can fail in many ways, none of which is the caller's doing.
    except Exception as error:
        raise ValueError(f"{path} is not a readable pickle of arrays: {error}.") from error
