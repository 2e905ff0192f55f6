"""Two processes under DDP, forked from one that has imported everything: `python framework_ranks.py FOLDER`.

Each rank has half of every micro-batch. Writes the weights of each rank after training with each framework.
"""

import sys
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator, debug_launcher
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from llqr.integrations.accelerate import TwoPasses
from llqr.integrations.lightning import TwoPasses as LightningPasses
from llqr.integrations.transformers import TwoPassTrainer
from small_trainings import llqr_sam, sam, samples

METHODS = {"sam": sam, "llqr+sam": llqr_sam}
EPOCHS, ACCUMULATE = 2, 2


def deterministic_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def share(batch, rank):
    return tuple(part.chunk(2)[rank] for part in batch)


class Net(LightningModule):
    def __init__(self, name, folder):
        super().__init__()
        self.net = deterministic_network()
        self.name, self.folder = name, folder

    def train_dataloader(self):
        return DataLoader([share(batch, self.global_rank) for batch in samples()], batch_size=None)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return METHODS[self.name](self.net)

    def on_train_end(self):
        torch.save(self.net.state_dict(), self.folder / f"lightning-{self.name}{self.global_rank}.pt")


def lightning(folder):
    for name in METHODS:
        settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            strategy="ddp_fork",
            max_epochs=EPOCHS,
            accumulate_grad_batches=ACCUMULATE,
            callbacks=[LightningPasses()],
            use_distributed_sampler=False,
            **settings,
        )
        trainer.fit(Net(name, folder))


def accelerate_rank(folder):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    rank = accelerator.process_index
    for name, method in METHODS.items():
        net = deterministic_network()
        model, opt = accelerator.prepare(net, method(net))
        passes = TwoPasses(accelerator, opt, model)
        for batch in samples() * EPOCHS:
            x, y = share(batch, rank)
            with accelerator.accumulate(model):
                passes.backward(lambda x, y, model=model: cross_entropy(model(x), y), x, y, batch=(x, y))
                opt.step()
                opt.zero_grad()
        torch.save(net.state_dict(), folder / f"accelerate-{name}{rank}.pt")


class Rows(torch.utils.data.Dataset):
    """The rows of the micro-batches in an order that gives each rank the same ones as above."""

    rows = [
        {"inputs": x, "labels": y}
        for batch in samples()
        for i in range(2)
        for x, y in zip(*share(batch, i), strict=True)
    ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


class WithLoss(nn.Module):
    """In the form of Hugging Face's models."""

    def __init__(self):
        super().__init__()
        self.net = deterministic_network()

    def forward(self, inputs, labels=None):
        logits = self.net(inputs)
        return SequenceClassifierOutput(None if labels is None else cross_entropy(logits, labels), logits)


def transformers_rank(folder):
    torch.set_num_threads(1)
    arguments = TrainingArguments(
        str(folder / "trainer"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=len(samples()[0][1]) // 2,
        gradient_accumulation_steps=ACCUMULATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    for name, method in METHODS.items():
        model = WithLoss()
        TwoPassTrainer(model, arguments, train_dataset=Rows(), optimizers=(method(model), None)).train()
        torch.save(model.net.state_dict(), folder / f"transformers-{name}{arguments.process_index}.pt")


def warned_rank(folder):
    """A loop that leaves the geometry with the bare model."""
    accelerator = Accelerator(cpu=True)
    net = deterministic_network()
    opt = llqr_sam(net)
    accelerator.prepare(net, opt)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.geometry.refresh(share(samples()[0], accelerator.process_index))
    found = [str(one.message) for one in caught if "a metric of its own" in str(one.message)]
    torch.save(found, folder / f"warned{accelerator.process_index}.pt")


def main(folder):
    lightning(folder)
    debug_launcher(accelerate_rank, (folder,))
    debug_launcher(transformers_rank, (folder,))
    debug_launcher(warned_rank, (folder,))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
