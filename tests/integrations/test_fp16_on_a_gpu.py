"""fp16 as the frameworks set it up themselves, with their own scalers, which they refuse to do on a CPU."""

import accelerate
import pytest
import torch
from accelerate.utils import GradScalerKwargs
from lightning.pytorch.plugins.precision import MixedPrecision
from test_accelerate import train
from test_lightning import Net, trainer
from torch import nn
from torch.utils.data import DataLoader

from accelerators import forget_accelerators
from llqr.integrations.lightning import TwoPasses as LightningPasses
from reference_loops import train_in_two_calls
from small_trainings import assert_same, llqr_sam, network, plain_llqr, sam, samples

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]
SCALER = {"init_scale": 2.0**24, "growth_interval": 3}  # the first steps overflow
METHODS = {"sam": sam, "llqr": plain_llqr, "llqr+sam": llqr_sam}


class InHalf(nn.Module):
    """Autocast in the network alone, as Accelerate has it: a loss of float32 outputs rounds differently."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        with torch.autocast("cuda", torch.float16):
            logits = self.net(x)
        return logits.float()


def on_the_gpu():
    return [(x.cuda(), y.cuda()) for x, y in samples()]


def by_hand(model, opt, accumulate, clip, autocast):
    """The same training in the two-call form, with torch's scaler."""
    scaler = torch.amp.GradScaler("cuda", **SCALER)
    settings = {"accumulate": accumulate, "epochs": 3, "clip": clip, "autocast": autocast}
    train_in_two_calls(model, opt, on_the_gpu(), scaler=scaler, **settings)
    assert scaler.get_scale() < SCALER["init_scale"]
    return model


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.1)])
def test_accelerate(method, accumulate, clip):
    forget_accelerators()
    acc = accelerate.Accelerator(
        mixed_precision="fp16",
        gradient_accumulation_steps=accumulate,
        kwargs_handlers=[GradScalerKwargs(**SCALER)],
    )
    model = network()  # the optimizer is made before Accelerate moves the weights, as its guide has it
    train(acc, model, METHODS[method](model), epochs=3, clip=clip)
    other = network().cuda()
    by_hand(InHalf(other), METHODS[method](other), accumulate, clip, None)
    assert_same(model, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.1)])
def test_lightning(method, accumulate, clip):
    module = Net(METHODS[method])
    precision = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", **SCALER))
    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip, "max_epochs": 3}
    fit = trainer(LightningPasses(), accelerator="gpu", plugins=[precision], **settings)
    fit.fit(module, DataLoader(samples(), batch_size=None))
    other = network().cuda()
    by_hand(other, METHODS[method](other), accumulate, clip, torch.float16)
    assert_same(module.net.cuda(), other, rtol=1e-5, atol=1e-6)
