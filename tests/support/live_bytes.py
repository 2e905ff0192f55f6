"""Bytes of the tensors that are alive at the same time, counted operation by operation."""

import weakref

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """`now`, the bytes of what was made while it was entered and is alive, and `peak`, the most; `known` left out."""

    def __init__(self, known):
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._watched = {}
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return made

    def _watch(self, storage):
        place, size = storage._cdata, storage.nbytes()
        if place in self._watched or place in self._known:
            return

        def gone(_):
            self.now -= size
            del self._watched[place]

        self._watched[place] = weakref.ref(storage, gone)
        self.now += size
