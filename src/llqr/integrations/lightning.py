"""Lightning: a callback that runs a step's second pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from llqr.integrations.passes import Passes, inner_optimizer, learn_together


class TwoPasses(Callback):
    """Lets a Trainer with automatic optimization train with any optimizer of llqr.

    With it `accumulate_grad_batches` and `precision="16-mixed"` work with a probe, the values that `training_step` logs
    and returns are those at the centre, and a refresh learns from the last micro-batch. Your `LightningModule` changes
    in `configure_optimizers` only. Several optimizers need manual optimization, as always in Lightning.

    Args:
        geometry_batch: makes `(inputs, targets)` of a batch, for batches that a geometry does not understand.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[TwoPasses()], logger=False, enable_checkpointing=False)
    """

    def __init__(self, geometry_batch: Callable[[Any], Any] | None = None) -> None:
        self._geometry_batch = geometry_batch
        self._passes: Passes | None = None
        self._batch: Any = None
        self._replaced = ExitStack()

    # -- the hooks that Lightning calls on the module are wrapped for as long as it trains -----------------------------

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            learn_together(inner_optimizer(optimizer), trainer.world_size)
        if not pl_module.automatic_optimization:
            return
        if inner_optimizer(trainer.optimizers[0]) is None:
            kind = type(trainer.optimizers[0]).__name__
            raise TypeError(f"TwoPasses: configure_optimizers returned {kind}, which is not an optimizer of llqr")
        self._passes = Passes(trainer.optimizers[0])
        for method, replacement in (
            ("training_step", partial(self._training_step, trainer)),
            ("optimizer_step", partial(self._optimizer_step, trainer, pl_module)),
        ):
            self._replaced.enter_context(_replaced(pl_module, method, replacement))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._replaced.close()
        self._passes = self._batch = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        for optimizer in trainer.optimizers:
            if (inner := inner_optimizer(optimizer)) is not None:
                inner.restore()
        self.on_train_end(trainer, pl_module)

    # -- the step ------------------------------------------------------------------------------------------------------

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._passes is not None:
            self._passes.forget()

    def _training_step(self, trainer: Trainer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._passes is None or self._passes.repeating:
            return original(*args, **kwargs)
        self._batch = args[0] if args else next(iter(kwargs.values()))
        self._passes._record(partial(self._forward_backward, trainer, *args, **kwargs))
        output = original(*args, **kwargs)
        self._passes.measure(output)
        return output

    def _forward_backward(self, trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        """What the Trainer does with a micro-batch, without its bookkeeping."""
        output = trainer.strategy.training_step(*args, **kwargs)
        loss = output["loss"] if isinstance(output, Mapping) else output
        if loss is not None:
            assert isinstance(loss, Tensor)
            trainer.strategy.backward(loss / trainer.accumulate_grad_batches, trainer.optimizers[0])
        return output

    def _optimizer_step(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        original: Callable[..., Any],
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Tensor | None],
    ) -> None:
        assert self._passes is not None
        loss = optimizer_closure()
        if getattr(trainer.fit_loop, "_skip_backward", False):
            self._passes.forget()  # of the epoch in which the SWA callback only updates BatchNorm's statistics
            return
        with quiet(pl_module):
            self._passes.repeat_at_probe(
                batch=self._batch if self._geometry_batch is None else partial(self._geometry_batch, self._batch),
                grad_scaler=getattr(trainer.precision_plugin, "scaler", None),
                unsynced=getattr(trainer.strategy, "block_backward_sync", nullcontext),
            )
        original(epoch, batch_idx, optimizer, lambda: loss)
        self._passes.end()


@contextmanager
def quiet(module: LightningModule) -> Iterator[None]:
    """Nothing is logged while entered, and metrics do not count."""
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    before = [{**metric.__dict__, **metric._copy_state_dict()} for metric in metrics]
    try:
        with _replaced(module, "log", lambda *args, **kwargs: None):
            yield
    finally:
        for metric, state in zip(metrics, before, strict=True):
            metric.__dict__.update(state)


@contextmanager
def _replaced(owner: Any, method: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """While entered, `replacement(original, ...)` is the method of this one object."""
    own = owner.__dict__.get(method)  # such as a compiled form of it
    original = getattr(owner, method)
    setattr(owner, method, wraps(original)(partial(replacement, original)))
    try:
        yield
    finally:
        delattr(owner, method)
        if own is not None:
            setattr(owner, method, own)
