"""Training loops written by hand, which those of the frameworks must equal."""

from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.functional import cross_entropy


def train_by_hand(model, base, batches, *, rho, accumulate=1, epochs=1, clip=None, first=0):
    """SAM without any part of llqr. Returns the loss of each micro-batch at the centre."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    losses = []

    def forward_backward(batch):
        loss = cross_entropy(model(batch[0]), batch[1])
        (loss / accumulate).backward()
        return loss.detach()

    for epoch in range(epochs):
        for start in range(0, len(batches), accumulate):
            states = []
            base.zero_grad()
            for i in range(start, min(start + accumulate, len(batches))):
                seed_micro_batch(epoch, first + i)
                states.append(torch.get_rng_state())
                losses.append(forward_backward(batches[i]))
            centre, statistics = [p.detach().clone() for p in parameters], [b.clone() for b in model.buffers()]
            norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters) + 1e-12)
            with torch.no_grad():
                for p in parameters:
                    p += rho * p.grad / norm
            base.zero_grad()
            for i, state in enumerate(states, start):
                torch.set_rng_state(state)
                forward_backward(batches[i])
            with torch.no_grad():
                for tensor, saved in zip([*parameters, *model.buffers()], [*centre, *statistics], strict=True):
                    tensor.copy_(saved)
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            base.step()
    return losses


def train_in_two_calls(
    model, opt, batches, *, accumulate=1, epochs=1, first_epoch=0, scaler=None, autocast=None, clip=None
):
    """Any method of llqr in its two-call form; a refresh learns from the last micro-batch, after the first pass."""

    def forward_backward(epoch, start):
        opt.zero_grad()
        for i in range(start, start + accumulate):
            seed_micro_batch(epoch, i)
            x, y = batches[i]
            with nullcontext() if autocast is None else torch.autocast(x.device.type, autocast, cache_enabled=False):
                loss = cross_entropy(model(x), y)
            loss = loss / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()

    for epoch in range(first_epoch, first_epoch + epochs):
        for start in range(0, len(batches), accumulate):
            forward_backward(epoch, start)
            opt.first_step(batch=batches[start + accumulate - 1], grad_scaler=scaler, zero_grad=False)
            if opt.probe is not None and opt.probe.active(opt.steps):
                forward_backward(epoch, start)
            if clip is not None:
                if scaler is not None:
                    scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            opt.second_step(grad_scaler=scaler)
            if scaler is not None:
                scaler.update()


def seed_micro_batch(epoch, index):
    """So that dropout's masks are those of the reference, whatever random numbers a framework draws in between."""
    torch.manual_seed(1000 * epoch + index)
