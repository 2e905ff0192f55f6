"""What turns a problem into its quadratic model."""

from abc import ABC, abstractmethod
from typing import ClassVar

from llqr.curvature.divergence import Divergence, Scale
from llqr.curvature.problem import Problem
from llqr.curvature.quadratic import QuadraticModel


class Engine(ABC):
    """Makes quadratic models of one divergence; may keep from one problem to the next what they share.

    Args:
        divergence: what `H` measures.
        scale: multiplies the curvature of the mean loss (default: the divergence's).
        gradients: in how many shares of the batch the model's gradient is given.
        compile: use `torch.compile` where the engine can.
    """

    name: ClassVar[str]
    #: Whether first derivatives of the network are enough, so that it may run as compiled, with fused kernels.
    first_order: ClassVar[bool] = False
    #: Whether a batch can be computed in pieces.
    micro_batches: ClassVar[bool] = True
    #: Whether products are exact up to rounding.
    exact: ClassVar[bool] = True
    #: Whether it leaves the weights of a model that FSDP2 has sharded as they are: its models are those of all ranks'
    #: batches, and have this rank's shards as vectors. Others gather the weights.
    of_shards: ClassVar[bool] = False

    def __init__(
        self, divergence: Divergence, scale: Scale | None = None, *, gradients: int = 1, compile: bool = False
    ) -> None:
        self.divergence = divergence
        self.scale = scale
        self.gradients = gradients
        self.compile = compile

    @abstractmethod
    def linearise(self, problem: Problem) -> QuadraticModel:
        """The quadratic model of a problem; everything that does not depend on `v` is computed here."""
