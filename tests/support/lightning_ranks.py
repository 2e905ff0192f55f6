"""Two processes of Lightning's DDP, forked from one that has imported everything: `python lightning_ranks.py FOLDER`.

Each rank has half of every micro-batch. Writes the weights of each rank after training.
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from llqr.integrations.lightning import TwoPasses
from reference_loops import llqr_sam, sam, samples

METHODS = {"sam": sam, "llqr+sam": llqr_sam}


def deterministic_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


class Net(LightningModule):
    def __init__(self, name, folder):
        super().__init__()
        self.net = deterministic_network()
        self.name, self.folder = name, folder

    def train_dataloader(self):
        shares = [tuple(part.chunk(2)[self.global_rank] for part in batch) for batch in samples()]
        return DataLoader(shares, batch_size=None)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return METHODS[self.name](self.net)

    def on_train_end(self):
        torch.save(self.net.state_dict(), self.folder / f"{self.name}{self.global_rank}.pt")


def main(folder):
    for name in METHODS:
        settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp_fork",
            max_epochs=2,
            accumulate_grad_batches=2,
            callbacks=[TwoPasses()],
            use_distributed_sampler=False,
            **settings,
        )
        trainer.fit(Net(name, folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
