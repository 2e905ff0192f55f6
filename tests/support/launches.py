"""How many kernels a piece of code would launch on a GPU, counted on any device from the operators it dispatches."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: Operators that only make a tensor of memory that is there, or of memory nobody writes to, or no tensor at all.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view", "promote_types"}


class Launches(TorchDispatchMode):
    """Counts operators while it is entered, by name. Views are free; a multi-tensor operator is one launch where torch
    has one kernel for the whole list, and one a tensor where it has not (members of unlike shape or memory order, or a
    list of several dtypes or devices).
    """

    def __init__(self):
        super().__init__()
        self.by_name = {}

    @property
    def total(self):
        return sum(self.by_name.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in _FREE and not function.is_view and not name.startswith("_record_function"):
            self.by_name[name] = self.by_name.get(name, 0) + _kernels(name, args)
        return function(*args, **(kwargs or {}))


def _kernels(name, args):
    if not name.startswith("_foreach_"):
        return 1
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor)]
    rows = list(zip(*lists, strict=True))
    together = all(_alike(row) for row in rows) and all(_of_one_kind(tensors) for tensors in lists)
    return 1 if together else len(rows)


def _of_one_kind(tensors):
    return len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1


def _alike(tensors):
    shapes = {(tensor.shape, tensor.stride()) for tensor in tensors}
    return len(shapes) == 1 and all(torch._debug_has_internal_overlap(tensor) == 0 for tensor in tensors)
