"""The engine "linearised": the product `v -> H v` as a graph of tensor operations, traced once and cut in two.

Most of a product does not depend on `v`: the activations, the derivatives of the nonlinearities, the loss and its
gradient. One cut through the traced graph separates them, so that a refresh computes them once and every product
repeats only what `v` enters. A trace serves any weights and any batch of one shape: training pays for it once.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch._dynamo
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass, rand_ops
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from llqr.curvature.curvature import Curvature
from llqr.curvature.derivatives import ForwardMode
from llqr.curvature.divergence import Divergence
from llqr.curvature.problem import Problem
from llqr.curvature.quadratic import Named, QuadraticModel

#: How many shapes are traced. Tracing takes long, and torch never forgets the code of a graph.
KEPT = 8


class Traces:
    """Quadratic models by traces of the first few shapes of batches, and in forward mode for further shapes.

    Args:
        divergence: as in `Curvature`.
        compile: hand the traced halves to `torch.compile`, which fuses their pointwise operations.
    """

    def __init__(self, divergence: Divergence, *, compile: bool = False) -> None:
        self._divergence, self._compile = divergence, compile
        self.kept: list[Trace] = []

    def linearise(self, problem: Problem) -> QuadraticModel:
        trace = next((trace for trace in self.kept if trace.fits(problem)), None)
        if trace is None and len(self.kept) >= KEPT:
            return self._untraced(problem)
        if trace is None:
            trace = Trace(problem, self._divergence, compile=self._compile)
            self.kept.append(trace)
        return trace.linearise(problem)

    def _untraced(self, problem: Problem) -> QuadraticModel:
        with _unfused_attention():
            model = Curvature(problem, self._divergence, ForwardMode).model()
        return replace(model, product=_unfused_attention()(model.product))

    def __getstate__(self) -> dict[str, Any]:
        """Without traces, which cannot be pickled and are made again."""
        return self.__dict__ | {"kept": []}


class Trace:
    """Loss, gradient and product of one kind of problem: the same model and loss, tensors of the same shapes."""

    def __init__(self, problem: Problem, divergence: Divergence, *, compile: bool = False) -> None:
        self._names = list(problem.parameters)
        self._signature = _signature(problem)
        count = len(self._names)
        graph = _product_graph(problem, divergence)
        once, each = _cut(graph, inputs=slice(count, 2 * count), outputs=2 + count)
        self._once: Callable[..., Any] = torch.compile(once, fullgraph=True, dynamic=False) if compile else once
        self._each: Callable[..., Any] = torch.compile(each, fullgraph=True, dynamic=False) if compile else each

    def fits(self, problem: Problem) -> bool:
        """Whether this problem has the shapes that were traced."""
        return bool(_signature(problem) == self._signature)

    def linearise(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of a problem; computes everything that does not depend on `v`."""
        count = len(self._names)
        loss, terms, *rest = self._once(*problem.tensors())
        gradient, saved = dict(zip(self._names, rest[:count], strict=True)), rest[count:]

        def product(v: Mapping[str, Tensor]) -> Named:
            return dict(zip(self._names, self._each(*saved, *(v[name] for name in self._names)), strict=True))

        return QuadraticModel(loss, gradient, product, terms)


def _product_graph(problem: Problem, divergence: Divergence) -> fx.GraphModule:
    """Tensors `theta..., v..., surroundings...` -> `loss, terms, g..., H v...`, with nothing repeated."""
    names = list(problem.parameters)
    count = len(names)

    def function(*tensors: Tensor) -> list[Tensor]:
        v = dict(zip(names, tensors[count : 2 * count], strict=True))
        curvature = Curvature(problem.at([*tensors[:count], *tensors[2 * count :]]), divergence, ForwardMode)
        gradient, Hv = curvature.gradient(), curvature.product(v)
        return [curvature.loss, curvature.terms, *gradient.values(), *Hv.values()]

    tensors = problem.tensors()
    example = (*tensors[:count], *map(torch.ones_like, tensors[:count]), *tensors[count:])
    # torch refuses to trace what is compiled, even where it runs as it was written.
    nested = torch._dynamo.config.patch(error_on_nested_fx_trace=False)
    with torch.no_grad(), nested, _unfused_attention(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.script", DeprecationWarning)  # torch's about itself
        traced = make_fx(function)(*example)
        # Shared results must not be written to, so mutations go before repetitions do.
        functional = make_fx(torch.func.functionalize(traced, remove="mutations"))(*example)
    # Dual numbers repeat the forward pass that is kept for the backward pass. The two are recognised as the same once
    # aliases of the same tensors are gone, which mean nothing where nothing is written to.
    for node in functional.graph.nodes:
        if node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
            node.replace_all_uses_with(node.args[0])
    shared: fx.GraphModule = CSEPass(rand_ops).call(functional).graph_module
    shared.graph.eliminate_dead_code()
    shared.recompile()
    used = [node.target for node in shared.graph.nodes if node.users]
    if any(torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()) for operation in used):
        # The forward pass and its repetition with dual numbers would not draw the same ones.
        raise RuntimeError(
            "engine: 'linearised' cannot trace a model that draws random numbers in eval mode; choose 'auto'"
        )
    return shared


def _cut(joint: fx.GraphModule, inputs: slice, outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What does not depend on these inputs, and what does.

    The first part takes the other inputs and returns the first `outputs` outputs, followed by everything that crosses
    the cut; the second takes what crosses and these inputs, and returns the other outputs. The cut lies where the least
    memory crosses it: torch's partitioner repeats cheap operations on the far side rather than keep their results. It
    tells the two kinds of inputs apart by their names.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    given = [node for node in joint.graph.nodes if node.op == "placeholder"]
    moving = given[inputs]
    for kind, nodes in (("primals", [node for node in given if node not in moving]), ("tangents", moving)):
        for i, node in enumerate(nodes):
            copies[node] = graph.placeholder(f"{kind}_{i}")
            copies[node].meta = dict(node.meta)
    for node in joint.graph.nodes:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    once, each = min_cut_rematerialization_partition(fx.GraphModule(joint, graph), None, num_fwd_outputs=outputs)
    return once, each


@contextmanager
def _unfused_attention() -> Iterator[None]:
    """Attention as products and a softmax, which have every derivative; in bfloat16 where its inputs are."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def _signature(problem: Problem) -> Any:
    """What a trace holds fixed: shapes, and what the batch holds besides tensors."""
    leaves, structure = pytree.tree_flatten((problem.inputs, problem.targets))
    constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return structure, constants, [(t.shape, t.stride(), t.dtype, t.device) for t in problem.tensors()]
