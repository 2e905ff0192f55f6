"""LLQR+SAM in Lightning: an ordinary LightningModule, and one callback of the Trainer.

python examples/lightning_digits.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import llqr
from llqr.integrations.lightning import TwoPasses


class Digits(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        base = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        geometry = llqr.Geometry(self.net, cross_entropy, structure="e-kfac", every=50)
        return llqr.LLQRSAM(base, geometry, rho=0.1)


torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
trainer = Trainer(max_epochs=3, accumulate_grad_batches=2, accelerator="cpu", callbacks=[TwoPasses()], **quiet)
trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True))
print(f"loss of the last epoch, at the centre: {float(trainer.callback_metrics['loss']):.3f}")
