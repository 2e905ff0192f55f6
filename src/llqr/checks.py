"""Every check of arguments. Each is called once, and says in one sentence what does not fit and what to do."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llqr.distributed.dtensors import any_sharded, refuse_fsdp1
from llqr.schedule import check, check_number, plain

if TYPE_CHECKING:
    from llqr.geometry import GeometryLike
    from llqr.inner import Inner, Solver
    from llqr.metric import Metric
    from llqr.runtime import Runtime

# -- the optimizer -----------------------------------------------------------------------------------------------------

OUTSIDE = (
    "step: there are gradients of a backward pass outside the closure, which the second pass would need at the probe; "
    "compute the loss of all micro-batches in the closure, or run each of them by llqr.integrations.passes.Passes; "
    "Lightning, Hugging Face and Accelerate have classes of their own in llqr.integrations"
)
NO_GRADIENTS = (
    "step: no parameter of the optimizer got a gradient, so that nothing moved; does the closure call backward()? "
    "(said once)"
)
LIGHTNING = (
    "step: the loss and metrics that Lightning logs are those at the probe, counted twice; add the callback "
    "llqr.integrations.lightning.TwoPasses() (said once)"
)
CLOSURE = (
    "closure: a probe needs the loss twice; pass a closure, call first_step() and second_step(), or use Passes of "
    "llqr.integrations.passes (repeat_at_probe() before step()); for Lightning, Hugging Face and Accelerate, see "
    "llqr.integrations"
)
RADIUS = (
    "rho: a probe needs its radius, and none suits every training: start with 0.05 for SGD and 0.005 for Adam or AdamW "
    "(ASAM: ten times that)"
)
ADOPT = "to go on with what fits, load_state_dict(state, adopt=True)"


def check_base(base: torch.optim.Optimizer) -> None:
    if not isinstance(base, torch.optim.Optimizer):
        raise TypeError(
            "base: expected an optimizer, as in llqr.SAM(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.05), got "
            f"{type(base).__name__}"
        )
    if isinstance(getattr(base, "base", None), torch.optim.Optimizer):
        raise TypeError(f"base: {type(base).__name__} is a wrapper already; pass the optimizer inside, its `base`")
    if isinstance(base, torch.optim.LBFGS):
        raise TypeError("base: LBFGS calls the closure by itself and cannot be wrapped")


def check_settings(
    probe: Any, transport: Any, model: Any, no_sync: Any, same_dropout: Any, buffers: str, measure: Any, max_norm: Any
) -> None:
    if max_norm is not None:
        check_number("max_norm", max_norm, 0)
    if probe is not None and not hasattr(type(probe), "displacement"):
        raise TypeError(f"probe: expected a llqr.SAMProbe (or None), got {probe!r}")
    if buffers not in ("centre", "probe"):
        raise ValueError(f"buffers: expected 'centre' or 'probe', got {buffers!r}")
    for name, flag in (("transport", transport), ("same_dropout", same_dropout), ("measure", measure)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected True or False, got {flag!r}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if no_sync is not None and not callable(no_sync):
        raise TypeError(f"no_sync: expected a function, such as ddp_model.no_sync, got {type(no_sync).__name__}")


def check_given(geometry: GeometryLike | None) -> None:
    if geometry is None:
        raise TypeError("geometry: expected a llqr.Geometry, got None")


def check_geometry(geometry: GeometryLike, base: torch.optim.Optimizer, no_sync: Any) -> None:
    if not hasattr(geometry, "transport"):
        raise TypeError(f"geometry: expected a llqr.Geometry, got {type(geometry).__name__}")
    known: Mapping[str, Tensor] | None = getattr(geometry, "parameters", None)
    mine = {parameter for group in base.param_groups for parameter in group["params"]}
    if known is not None and mine.isdisjoint(known.values()):
        raise ValueError(
            "geometry: none of its parameters is one of the optimizer's, so that U would never be applied; make both "
            "from the same model, after its weights are in place"
        )
    if no_sync is not None and getattr(geometry, "shards", 1) > 1:
        raise ValueError(
            "no_sync: a probe of each rank's own gradient needs the whole metric on every rank; leave out "
            "Geometry(shards=...) or no_sync"
        )


def check_parameters(parameters: Sequence[Tensor], no_sync: Any) -> None:
    refuse_fsdp1(parameters)
    if no_sync is not None and any_sharded(parameters):
        raise ValueError(
            "no_sync: a probe of each rank's own (m-sharpness) needs the whole weights on every rank, but they are "
            "sharded; leave it out, or use DDP"
        )


def check_closure(closure: Any) -> None:
    if closure is not None and not callable(closure):
        raise TypeError(
            f"closure: expected a function that computes the loss, got {type(closure).__name__}; a batch to learn from "
            "is step(closure, batch=...)"
        )


def is_lightnings(closure: Any) -> bool:
    """Whether this is the closure of Lightning's automatic optimization, which logs whatever pass ran last."""
    wrapped = getattr(closure, "args", None) or (closure,)
    return type(wrapped[-1]).__module__.endswith("loops.optimization.automatic")


def check_gradients(parameters: Sequence[Tensor], grads: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    for parameter, gradient in zip(parameters, grads, strict=True):
        if gradient.layout != torch.strided or gradient.dtype.is_complex:
            kind, instead = (
                ("complex", "keep torch.view_as_real of it as the parameter")
                if gradient.dtype.is_complex
                else ("sparse", "make the embedding with sparse=False")
            )
            name = repr(names[parameter]) if parameter in names else f"one of shape {tuple(parameter.shape)}"
            raise TypeError(f"parameters: {name} has a {kind} gradient, which is not supported; {instead}")


# -- a saved state -----------------------------------------------------------------------------------------------------


def check_state_dict(state: Mapping[str, Any]) -> None:
    if not {"state", "param_groups"} <= state.keys():
        raise ValueError(
            "state_dict: expected that of an optimizer, with the keys 'state' and 'param_groups', got "
            f"{', '.join(map(repr, list(state)[:4])) or 'an empty one'}"
        )


def check_saved(own: Mapping[str, Any] | None, ours: Mapping[str, Any], states: int) -> None:
    """Refuse our part `own` of a saved state that does not fit `ours`, or beside which the base lacks `states`."""
    if own is None:
        raise ValueError(f"state_dict: no 'llqr' entry, so it was not saved by this optimizer; {ADOPT}")
    saved, expected = (None if part["probe"] is None else part["probe"]["name"] for part in (own, ours))
    if saved != expected:
        raise ValueError(f"state_dict: saved with the probe {saved!r}, this optimizer has {expected!r}; {ADOPT}")
    if (own["geometry"] is None) != (ours["geometry"] is None):
        raise ValueError(f"state_dict: only one of this optimizer and the saved one has a geometry; {ADOPT}")
    if len(own["shapes"]) != len(ours["shapes"]):
        raise ValueError(
            f"state_dict: saved for {len(own['shapes'])} parameters, this optimizer has {len(ours['shapes'])}"
        )
    for i, (their, our) in enumerate(zip(own["shapes"], ours["shapes"], strict=True)):
        if list(their) != list(our):
            raise ValueError(f"state_dict: parameter {i} was saved with shape {list(their)}, here it is {list(our)}")
    missing = own.get("states", 0) - states
    if missing > 0:
        raise ValueError(
            f"state_dict: the base optimizer's state of {missing} parameters is missing; for a fresh optimizer, call "
            "its make_state() before torch.distributed.checkpoint loads into its state_dict()"
        )


# -- what a geometry is made of ----------------------------------------------------------------------------------------
# The optimizer imports this module, but neither metric nor curvature: checks that need these import them when called.


def check_inner(inner: Inner, solvers: Mapping[str, type[Solver]]) -> None:
    from llqr.curvature.divergence import check_scale

    if not isinstance(inner.solver, str) or inner.solver not in solvers:
        raise ValueError(f"solver: unknown {inner.solver!r}; choose one of {', '.join(solvers)}")
    check("lr", inner.lr, 0)
    for name, lower in (("steps", 1), ("product_every", 1), ("momentum", 0), ("clip", 0)):
        value, whole = getattr(inner, name), lower == 1
        if not hasattr(value, "__index__" if whole else "__float__"):
            raise TypeError(f"{name}: expected a {'whole ' if whole else ''}number, got {value!r}")
        if not value >= lower:
            raise ValueError(f"{name}: expected a number >= {lower}, got {value!r}")
    for name in ("normalise", "debias"):
        if not isinstance(getattr(inner, name), bool):
            raise ValueError(f"{name}: expected True or False, got {getattr(inner, name)!r}")
    if inner.product_every > 1 and not solvers[inner.solver].extrapolates:
        raise ValueError(f"product_every: not with solver={inner.solver!r}, whose steps are made of their products")
    check_scale(inner.curvature_scale)


def check_runtime(runtime: Runtime, engines: Collection[str]) -> None:
    if not isinstance(runtime.engine, str) or runtime.engine not in ("auto", *engines):
        raise ValueError(f"engine: unknown {runtime.engine!r}; choose auto or one of {', '.join(engines)}")
    for name in ("capture", "compile"):
        if not isinstance(getattr(runtime, name), bool):
            raise TypeError(f"{name}: expected True or False, got {getattr(runtime, name)!r}")
    for name in ("autocast", "dtype", "apply_dtype"):
        dtype = getattr(runtime, name)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name}: expected a torch.dtype, such as torch.float32, got {dtype!r}")
    for name in ("max_side", "max_failures", "micro_batch"):
        number = getattr(runtime, name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            kind = "a positive number of samples" if name == "micro_batch" else "a whole number of at least 1"
            raise ValueError(f"{name}: expected {kind}, got {number!r}")
    if runtime.compile and runtime.engine != "linearised":
        raise ValueError("compile: only with engine='linearised', whose traced product it compiles")
    if runtime.micro_batch is not None:
        if runtime.engine == "linearised":
            raise ValueError("micro_batch: not with engine='linearised', which keeps a whole batch's activations")
        if runtime.capture:
            raise ValueError("capture: not with micro_batch")


def check_geometry_settings(inner: Any, runtime: Any, damping: Any, on_refresh: Any) -> None:
    from llqr.inner import Inner
    from llqr.runtime import Runtime

    for name, given, kind in (("inner", inner, Inner), ("runtime", runtime, Runtime)):
        if not (given is None or isinstance(given, kind)):
            raise TypeError(f"{name}: expected a llqr.{kind.__name__}, got {given!r}")
    if on_refresh is not None and not callable(on_refresh):
        raise TypeError(f"on_refresh: expected a function of a report, got {type(on_refresh).__name__}")
    is_share = isinstance(damping, str) and re.fullmatch(r"\s*\d+(\.\d*)?\s*%\s*", damping)
    number = plain(damping)
    if not is_share and not (number is not None and number >= 0):
        raise ValueError(f"damping: expected a number >= 0, or a share of the curvature such as '10%', got {damping!r}")


def check_capture(metric: Metric, parameters: Mapping[str, Tensor]) -> None:
    """Refuse what cannot be replayed as CUDA graphs."""
    if metric.whole is not metric:
        raise ValueError("capture: not with shards, because the ranks exchange vectors in every inner step")
    if not all(parameter.is_cuda for parameter in parameters.values()):
        raise ValueError("capture: CUDA graphs need every parameter on a CUDA device")
