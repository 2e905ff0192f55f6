"""The product `v -> H v` as a graph of tensor operations, traced once and cut in two.

Most of a product does not depend on `v`: the activations, the derivatives of the nonlinearities, the loss and its
gradient. One cut through the traced graph separates them, so that a refresh computes them once and every product
repeats only what `v` enters. A trace serves any weights and any batch of one shape: training pays for it once.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch._dynamo
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass, rand_ops
from torch.nn.attention import SDPBackend, sdpa_kernel

from llqr.curvature.curvature import Curvature
from llqr.curvature.derivatives import ForwardMode
from llqr.curvature.divergence import Divergence, Scale
from llqr.curvature.problem import Problem
from llqr.curvature.quadratic import Named, QuadraticModel


class Trace:
    """Loss, gradient and product of one kind of problem: the same model and loss, tensors of the same shapes.

    Args:
        problem: an example.
        divergence, scale: as in `Curvature`.
        gradients: in how many shares of the batch the gradient is given.
        compile: hand both halves to `torch.compile`, which fuses their pointwise operations.
    """

    def __init__(
        self,
        problem: Problem,
        divergence: Divergence,
        scale: Scale | None = None,
        *,
        gradients: int = 1,
        compile: bool = False,
    ) -> None:
        self._names = list(problem.parameters)
        self._signature = problem_signature(problem)
        graph = _product_graph(problem, divergence, scale, gradients)
        count = len(self._names)
        self._shares = gradients if gradients > 1 else 0
        once, each = _cut(graph, inputs=slice(count, 2 * count), outputs=2 + count * (1 + self._shares))
        self._once: Callable[..., Any] = torch.compile(once, fullgraph=True, dynamic=False) if compile else once
        self._each: Callable[..., Any] = torch.compile(each, fullgraph=True, dynamic=False) if compile else each
        kept = sum(node.op == "placeholder" for node in each.graph.nodes) - count
        several = torch.vmap(each, (*[None] * kept, *[0] * count))
        self._several: Callable[..., Any] = torch.compile(several, dynamic=False) if compile else several

    def fits(self, problem: Problem) -> bool:
        """Whether this problem has the shapes that were traced."""
        return bool(problem_signature(problem) == self._signature)

    def linearise(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of a problem: everything that does not depend on `v` is computed here."""
        count = len(self._names)
        loss, terms, *rest = self._once(*problem.tensors())
        sets = [dict(zip(self._names, rest[i * count :], strict=False)) for i in range(1 + self._shares)]
        saved = rest[count * len(sets) :]

        def multiply(graph: Callable[..., Any], v: Mapping[str, Tensor]) -> Named:
            return dict(zip(self._names, graph(*saved, *(v[name] for name in self._names)), strict=True))

        product, products = partial(multiply, self._each), partial(multiply, self._several)
        return QuadraticModel(loss, sets[0], product, tuple(sets[1:]), terms, products)


def untraced(problem: Problem, divergence: Divergence, scale: Scale | None, gradients: int) -> QuadraticModel:
    """The same quadratic model without a trace."""
    with _unfused_attention():
        model = Curvature(problem, divergence, ForwardMode, scale).model(gradients)

    def product(v: Mapping[str, Tensor]) -> Named:
        with _unfused_attention():
            return model.product(v)

    return replace(model, product=product)


def _product_graph(problem: Problem, divergence: Divergence, scale: Scale | None, gradients: int) -> fx.GraphModule:
    """Tensors `theta..., v..., surroundings...` -> `loss, terms, g..., g_k..., H v...`, with nothing repeated."""
    names = list(problem.parameters)
    count = len(names)

    def function(*tensors: Tensor) -> list[Tensor]:
        v = dict(zip(names, tensors[count : 2 * count], strict=True))
        curvature = Curvature(problem.at([*tensors[:count], *tensors[2 * count :]]), divergence, ForwardMode, scale)
        model = curvature.model(gradients)
        sets = [model.gradient, *model.gradients, curvature.product(v)]
        return [model.loss, curvature.terms, *(part for named in sets for part in named.values())]

    theta = problem.tensors()[:count]
    example = (*theta, *map(torch.ones_like, theta), *problem.tensors()[count:])
    # What is compiled runs as it was written here, which torch would refuse otherwise.
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
        elif node.target is torch.ops.aten.copy.default and _copies_all(node):
            node.target, node.args = torch.ops.aten.clone.default, (node.args[1],)
            node.kwargs = {"memory_format": torch.contiguous_format}
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


def _copies_all(node: fx.Node) -> bool:
    """Whether a former write in place is a plain copy, which `torch.vmap` can batch."""
    result, source = node.meta["val"], node.args[1]
    assert isinstance(source, fx.Node)
    given = source.meta["val"]
    return bool(given.shape == result.shape and given.dtype == result.dtype and result.is_contiguous())


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


def problem_signature(problem: Problem) -> Any:
    """What a trace holds fixed."""
    return problem.constants, [(t.shape, t.stride(), t.dtype, t.device) for t in problem.tensors()]
