"""Lightning's Trainer and Fabric, each beside a loop written by hand."""

import logging
import warnings

import lightning
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import llqr
from llqr.integrations.lightning import TwoPasses
from llqr.integrations.passes import Passes
from reference_loops import seed_micro_batch, train_by_hand, train_in_two_calls
from small_trainings import assert_same, llqr_sam, network, plain_llqr, sam, samples, sgd, weights

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(LightningModule):
    def __init__(self, method=sam):
        super().__init__()
        self.net = network()
        self.accuracy = MulticlassAccuracy(3)
        self.method = method
        self.losses = []

    def on_train_batch_start(self, batch, batch_idx):
        seed_micro_batch(self.current_epoch, batch_idx)

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = cross_entropy(logits, batch[1])
        self.accuracy.update(logits, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"])

    def configure_optimizers(self):
        return self.method(self.net)


def trainer(*callbacks, **settings):
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    where = {"accelerator": "cpu", "devices": 1, "max_epochs": 2}
    return Trainer(**where | silent | settings, callbacks=list(callbacks))


def loader(batches=None):
    return DataLoader(samples() if batches is None else batches, batch_size=None)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, None), (2, 0.1), (3, None)])
def test_sam_is_the_loop_written_by_hand(accumulate, clip):
    module, other = Net(), network()
    trainer(TwoPasses(), accumulate_grad_batches=accumulate, gradient_clip_val=clip).fit(module, loader())
    losses = train_by_hand(other, sgd(other), samples(), rho=0.1, accumulate=accumulate, epochs=2, clip=clip)
    assert_same(module.net, other, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.stack(module.losses), torch.stack(losses) / accumulate, rtol=1e-6, atol=1e-6)


def test_sam_without_the_callback():
    """It trains alike, but Lightning logs the loss of the second pass."""
    module, other = Net(), network()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        trainer().fit(module, loader())
    assert sum("those at the probe, counted twice; add the callback" in str(one.message) for one in shown) == 1
    train_by_hand(other, sgd(other), samples(), rho=0.1, epochs=2)
    assert_same(module.net, other, rtol=1e-6, atol=1e-6)


def test_accumulation_without_the_callback_is_refused():
    with pytest.raises(RuntimeError, match=r"outside the closure.*llqr\.integrations"):
        trainer(accumulate_grad_batches=2).fit(Net(), loader())


def test_16_mixed_without_the_callback_is_refused():
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"a probe needs the loss twice.* llqr\.integrations"):
        trainer(plugins=[precision]).fit(Net(), loader())


def test_a_geometry_with_batches_of_its_own_needs_no_callback():
    def method(model):
        opt = llqr_sam(model)
        opt.geometry.batches = samples()
        return opt

    module, other = Net(method), network()
    trainer().fit(module, loader())
    opt = method(other)
    for epoch in range(2):
        for i, batch in enumerate(samples()):

            def closure(batch=batch, i=i, epoch=epoch):
                opt.zero_grad()
                seed_micro_batch(epoch, i)
                loss = cross_entropy(other(batch[0]), batch[1])
                loss.backward()
                return loss

            opt.step(closure)
    assert_same(module.net, other)


def test_logs_and_metrics_are_those_at_the_centre():
    module, other = Net(), network()
    fit = trainer(TwoPasses(), max_epochs=1)
    fit.fit(module, loader())
    losses = train_by_hand(other, sgd(other), samples(), rho=0.1)
    torch.testing.assert_close(fit.callback_metrics["loss_step"], losses[-1])
    torch.testing.assert_close(fit.callback_metrics["loss_epoch"], torch.stack(losses).mean())
    counted = sum(getattr(module.accuracy, name).sum() for name in ("tp", "fn"))
    assert counted == sum(len(y) for _, y in samples())


@pytest.mark.parametrize("method", [llqr_sam, plain_llqr])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_learned_metric_is_bit_equal(method, accumulate):
    module, other = Net(method), network()
    trainer(TwoPasses(), accumulate_grad_batches=accumulate).fit(module, loader())
    opt = method(other)
    train_in_two_calls(other, opt, samples(), accumulate=accumulate, epochs=2)
    assert opt.geometry.refreshes > 1
    assert_same(module.net, other)


def test_a_batch_of_another_form():
    batches = [{"pixels": x, "answers": y} for x, y in samples()]

    class Renamed(Net):
        def training_step(self, batch):
            return super().training_step((batch["pixels"], batch["answers"]), 0)

    module, other = Renamed(llqr_sam), network()
    callback = TwoPasses(geometry_batch=lambda batch: (batch["pixels"], batch["answers"]))
    trainer(callback).fit(module, loader(batches))
    train_in_two_calls(other, llqr_sam(other), samples(), epochs=2)
    assert_same(module.net, other)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_16_mixed(accumulate, clip):
    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)  # the first steps overflow

    module, other = Net(llqr_sam), network()
    precision = MixedPrecision("16-mixed", "cpu", scaler())
    fit = trainer(
        TwoPasses(), plugins=[precision], accumulate_grad_batches=accumulate, gradient_clip_val=clip, max_epochs=3
    )
    fit.fit(module, loader())
    theirs = scaler()
    settings = {"scaler": theirs, "autocast": torch.float16, "clip": clip}
    train_in_two_calls(other, llqr_sam(other), samples(), accumulate=accumulate, epochs=3, **settings)
    assert precision.scaler.get_scale() == theirs.get_scale() < 2.0**24
    assert_same(module.net, other, rtol=1e-6, atol=1e-6)


def test_bf16_mixed_without_the_callback():
    module, other = Net(), network()
    trainer(precision="bf16-mixed").fit(module, loader())
    train_in_two_calls(other, sam(other), samples(), epochs=2, autocast=torch.bfloat16)
    assert_same(module.net, other)


def test_bf16_mixed():
    module, other = Net(llqr_sam), network()
    trainer(TwoPasses(), precision="bf16-mixed", accumulate_grad_batches=2).fit(module, loader())
    train_in_two_calls(other, llqr_sam(other), samples(), accumulate=2, epochs=2, autocast=torch.bfloat16)
    assert_same(module.net, other)


def test_the_probe_may_start_later_and_follow_a_schedule():
    def method(model):
        return llqr.SAM(sgd(model), rho=lambda step: 0.01 * step, start_after=3)

    calls = []

    class Counting(Net):
        def training_step(self, batch, batch_idx):
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

    module, other = Counting(method), network()
    trainer(TwoPasses(), max_epochs=1).fit(module, loader())
    train_in_two_calls(other, method(other), samples())
    assert_same(module.net, other)
    assert len(calls) == 3 + 2 * 5


class _Skipping(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 0 else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


@pytest.mark.parametrize("callbacks", [[], [TwoPasses()]], ids=["without", "with"])
def test_a_training_step_that_returns_none_is_no_step(callbacks):
    module = _Skipping()
    trainer(*callbacks, max_epochs=1).fit(module, loader())
    kept = [batch for i, batch in enumerate(samples()) if i % 3]
    assert module.trainer.optimizers[0].steps == len(kept)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_window_whose_last_training_step_returns_none(scaled):
    """Lightning steps on what has accumulated, but not in 16-mixed; the weights are at the centre in any case."""

    class Half(_Skipping):
        def training_step(self, batch, batch_idx):
            loss = Net.training_step(self, batch, batch_idx)
            return None if batch_idx % 4 == 3 else loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert not self.trainer.optimizers[0]._begun

    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0))] if scaled else []
    module = Half()
    fit = trainer(TwoPasses(), plugins=plugins, accumulate_grad_batches=2, max_epochs=1)
    fit.fit(module, loader())
    assert fit.optimizers[0].steps == (2 if scaled else 4)


def test_a_module_that_decides_against_a_step():
    class Every(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            if batch_idx % 2:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    module, other = Every(), network()
    trainer(TwoPasses(), max_epochs=1).fit(module, loader())
    base = sgd(other)
    for i, batch in enumerate(samples()):
        seed_micro_batch(0, i)
        if i % 2:
            train_by_hand(other, base, [batch], rho=0.1, first=i)
        else:
            other(batch[0])  # BatchNorm's statistics
    assert_same(module.net, other, rtol=1e-6, atol=1e-6)


def test_hooks_see_gradients_without_the_loss_scale():
    class Watching(Net):
        sizes = ()

        def on_before_optimizer_step(self, optimizer):
            size = torch.cat([p.grad.flatten() for p in self.net.parameters()]).norm()
            self.sizes = (*self.sizes, float(size))

    plain, scaled = Watching(), Watching()
    trainer(TwoPasses(), max_epochs=1).fit(plain, loader())
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    trainer(TwoPasses(), max_epochs=1, plugins=[precision]).fit(scaled, loader())
    assert len(plain.sizes) == len(samples())
    assert scaled.sizes == pytest.approx(plain.sizes, rel=0.05)


def test_a_scheduler():
    def method(model):
        opt = llqr_sam(model)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)}

    module, other = Net(method), network()
    trainer(TwoPasses()).fit(module, loader())
    opt = llqr_sam(other)
    for epoch in range(2):
        opt.param_groups[0]["lr"] = 0.1 * 0.5**epoch
        train_in_two_calls(other, opt, samples(), first_epoch=epoch)
    assert_same(module.net, other)


class _Recorder(Callback):
    """The averages and the trained weights that an averaging callback sees after each batch."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen = [*getattr(self, "seen", []), weights(pl_module.net)]


@pytest.mark.parametrize("callbacks", [[], [TwoPasses()]], ids=["without", "with"])
def test_ema_averages_the_centres(callbacks):
    module, other = Net(), Net()
    averaging = EMAWeightAveraging(decay=0.5)
    trainer(*callbacks, averaging).fit(module, loader())
    watched = _Recorder()
    trainer(TwoPasses(), watched).fit(other, loader())
    average = weights(Net().net)
    for step, seen in enumerate(watched.seen):
        average = [(a + s) / 2 if step else s for a, s in zip(average, seen, strict=True)]
    for ours, theirs, parameter in zip(weights(module.net), average, module.net.state_dict(), strict=True):
        if "running" not in parameter and "num_batches" not in parameter:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("callbacks", [[], [TwoPasses()]], ids=["without", "with"])
def test_swa_averages_the_centres(callbacks):
    """The weights after epochs 1, 2 and 3 (Lightning leaves out the last epoch's), of loops written by hand."""
    module = Net()
    fit = trainer(StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=2), *callbacks, max_epochs=4)
    fit.fit(module, loader())
    assert fit.optimizers[0].steps == 4 * len(samples())
    networks = [network() for _ in range(3)]
    for epochs, other in enumerate(networks, start=1):
        train_by_hand(other, sgd(other), samples(), rho=0.1, epochs=epochs)
    average = network()
    with torch.no_grad():
        for mean, *parts in zip(average.parameters(), *(other.parameters() for other in networks), strict=True):
            mean.copy_(torch.stack(parts).mean(0))
    torch.optim.swa_utils.update_bn(samples(), average)
    assert_same(module.net, average, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_resume_is_bit_equal(tmp_path, accumulate):
    settings = {"accumulate_grad_batches": accumulate, "enable_checkpointing": True, "default_root_dir": tmp_path}
    whole, half, rest = Net(llqr_sam), Net(llqr_sam), Net(llqr_sam)
    trainer(TwoPasses(), **settings, max_epochs=4).fit(whole, loader())
    saving = ModelCheckpoint(dirpath=tmp_path, filename="half")
    trainer(TwoPasses(), saving, **settings, max_epochs=2).fit(half, loader())
    resumed = trainer(TwoPasses(), **settings, max_epochs=4)
    resumed.fit(rest, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert resumed.optimizers[0].steps == 4 * len(samples()) / accumulate
    assert_same(whole.net, rest.net)


def test_weights_return_to_the_centre_when_a_pass_raises():
    class Failing(Net):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            if self.calls == 6:  # the second pass of the third step
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    module, other = Failing(), network()
    with pytest.raises(SystemExit):
        trainer(TwoPasses()).fit(module, loader())
    train_by_hand(other, sgd(other), samples()[:2], rho=0.1)
    for ours, theirs in zip(module.net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert not {"training_step", "optimizer_step", "log"} & module.__dict__.keys()


def test_the_modules_own_hooks_stay():
    class Warming(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (batch_idx + 1)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    module, other = Warming(), network()
    base = sgd(other)
    trainer(TwoPasses(), max_epochs=1).fit(module, loader())
    for i, batch in enumerate(samples()):
        base.param_groups[0]["lr"] = 0.01 * (i + 1)
        train_by_hand(other, base, [batch], rho=0.1, first=i)
    assert_same(module.net, other, rtol=1e-6, atol=1e-6)


class Manual(Net):
    """The forms of a step that manual optimization allows."""

    scaler = None

    def __init__(self, method, form):
        super().__init__(method)
        self.automatic_optimization = False
        self.form = form

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()

        def forward_backward():
            seed_micro_batch(self.current_epoch, batch_idx)
            opt.zero_grad()
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        if self.form == "closure":
            opt.step(forward_backward, batch=batch)
            return
        forward_backward()
        opt.first_step(batch=batch, grad_scaler=self.scaler)
        forward_backward()
        if self.form == "two calls":
            opt.second_step()
        else:
            opt.step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


@pytest.mark.parametrize("form", ["closure", "two calls", "step"])
def test_manual_optimization(form):
    module, other = Manual(sam, form), network()
    fit = trainer()
    fit.fit(module, loader())
    train_by_hand(other, sgd(other), samples(), rho=0.1, epochs=2)
    assert fit.optimizers[0].steps == 2 * len(samples())
    assert_same(module.net, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", ["two calls", "step"])
def test_manual_optimization_with_a_metric(form):
    module, other = Manual(llqr_sam, form), network()
    trainer().fit(module, loader())
    train_in_two_calls(other, llqr_sam(other), samples(), epochs=2)
    assert_same(module.net, other)


def test_manual_optimization_in_16_mixed():
    ours, theirs = (torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3) for _ in range(2))
    module, other = Manual(llqr_sam, "step"), network()
    module.scaler = ours
    trainer(plugins=[MixedPrecision("16-mixed", "cpu", ours)]).fit(module, loader())
    train_in_two_calls(other, llqr_sam(other), samples(), epochs=2, scaler=theirs, autocast=torch.float16)
    assert ours.get_scale() == theirs.get_scale() < 2.0**24
    assert_same(module.net, other, rtol=1e-6, atol=1e-6)


def test_manual_optimization_without_a_probe():
    class Plain(Manual):
        def training_step(self, batch, batch_idx):
            opt = self.optimizers()
            seed_micro_batch(self.current_epoch, batch_idx)
            opt.zero_grad()
            self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]))
            opt.step(batch=batch)

    module, other = Plain(plain_llqr, ""), network()
    trainer().fit(module, loader())
    train_in_two_calls(other, plain_llqr(other), samples(), epochs=2)
    assert_same(module.net, other)


# -- Fabric ------------------------------------------------------------------------------------------------------------


def fabric_loop(method, form, accumulate=1, **settings):
    fabric = lightning.Fabric(accelerator="cpu", devices=1, **settings)
    model = network()
    net, opt = fabric.setup(model, method(model))
    passes = Passes(opt, fabric.world_size)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    batches = samples()
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]

        def compute_loss(batch, index):
            seed_micro_batch(0, index)
            return cross_entropy(net(batch[0]), batch[1]) / accumulate

        def closure(window=window, start=start):
            opt.zero_grad()
            for i, batch in enumerate(window, start):
                fabric.backward(compute_loss(batch, i))

        if form == "closure":
            opt.step(closure)
        elif form == "two calls":
            closure()
            opt.first_step(batch=window[-1])
            closure()
            opt.step()
        else:
            for i, batch in enumerate(window, start):
                passes.run(lambda batch, i: fabric.backward(compute_loss(batch, i)), batch, i)
            passes.repeat_at_probe(batch=window[-1], grad_scaler=scaler)
            opt.step()
            opt.zero_grad()
    return model, opt.steps


@pytest.mark.parametrize("form", ["closure", "two calls", "passes"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_fabric(form, accumulate):
    model, steps = fabric_loop(sam, form, accumulate)
    assert steps == len(samples()) / accumulate
    other = network()
    train_by_hand(other, sgd(other), samples(), rho=0.1, accumulate=accumulate)
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_a_geometry_draws_from_the_loader_that_fabric_has_wrapped():
    """Whose persistent workers must not begin again in the training loop."""
    fabric, model = lightning.Fabric(accelerator="cpu", devices=1), network()
    geometry = llqr_sam(model).geometry
    data = [(torch.full((4,), float(i)), i % 3) for i in range(8)]
    geometry.batches = own = fabric.setup_dataloaders(DataLoader(data, 2, num_workers=1, persistent_workers=True))
    seen = []
    for i, (x, _) in enumerate(own):
        seen.append(int(x[0, 0]))
        if i == 1:
            geometry.refresh()
    assert seen == [0, 2, 4, 6]


def test_fabric_with_a_metric():
    model, _ = fabric_loop(llqr_sam, "passes", 2)
    other = network()
    train_in_two_calls(other, llqr_sam(other), samples(), accumulate=2)
    assert_same(model, other)


def test_fabric_16_mixed():
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision

    precision = FabricMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))
    model, _ = fabric_loop(sam, "passes", 2, plugins=[precision])
    other, scaler = network(), torch.amp.GradScaler("cpu", init_scale=2.0**20)
    train_in_two_calls(other, sam(other), samples(), accumulate=2, scaler=scaler, autocast=torch.float16)
    assert precision.scaler.get_scale() == scaler.get_scale()
    assert_same(model, other, rtol=1e-6, atol=1e-6)
