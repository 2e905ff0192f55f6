"""The loops of twelve public training scripts, with llqr put in, beside SAM and LLQR+SAM written by hand.

Each loop has the structure that its project documents, with a tiny network and random data, in float64. Lines that llqr
adds or changes end in `# +`. A loop returns its model and the losses that it logs, which must be those at the centre.
"""

import logging
import tempfile
from functools import partial

import lightning
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from lightning.pytorch.demos import Transformer
from torch import nn, optim
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

import llqr
import llqr.integrations.accelerate
import llqr.integrations.lightning
from accelerators import forget_accelerators
from llqr.integrations.passes import Passes
from llqr.integrations.transformers import TwoPassTrainer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")

VOCABULARY, LENGTH, EVERY = 11, 6, 2


@pytest.fixture(autouse=True)
def _exact():
    """Float64, and attention with the derivatives that exact curvature needs."""
    torch.set_default_dtype(torch.float64)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        torch.set_default_dtype(torch.float32)
        forget_accelerators()


def geometry(model, loss_fn, **settings):
    return llqr.Geometry(model, loss_fn, every=EVERY, inner=llqr.Inner(steps=5, lr=0.05), ema=0.5, **settings)


def sam(base, model, rho, loss_fn=None, forward=None, **settings):
    return llqr.SAM(base, rho=rho, model=model, **settings)


def llqr_sam(base, model, rho, loss_fn=F.cross_entropy, forward=None, **settings):
    return llqr.LLQRSAM(base, geometry(model, loss_fn, forward=forward), rho=rho, **settings)


def clip_to(max_norm):
    return partial(nn.utils.clip_grad_norm_, max_norm=max_norm)


class ByHand:
    """SAM, and LLQR+SAM with a metric that a geometry learns; the step is written out, without any part of llqr's.

    For `sam` there is no metric. `early` learns it before the first pass, as a step with a closure does; `clip` comes
    before the metric, `clip_update` after it.
    """

    def __init__(self, method, base, model, rho, *, clip=None, clip_update=None, early=False, **problem):
        self.model, self.base, self.rho, self.early = model, base, rho, early
        self.clip, self.clip_update = clip or (lambda _: None), clip_update or (lambda _: None)
        self.geometry = geometry(model, **{"loss_fn": F.cross_entropy, **problem}) if method is llqr_sam else None
        self.parameters, self.steps = list(model.parameters()), 0

    def step(self, *passes, batch):
        """Each pass is a function that returns the loss of one micro-batch. Returns the losses at the centre."""
        if self.early:
            self.learn(batch)
        before = [buffer.clone() for buffer in self.model.buffers()]
        losses, states = self.run(passes)
        if not self.early:
            self.learn(batch)
        after, random = [buffer.clone() for buffer in self.model.buffers()], torch.get_rng_state()
        centre, g = [p.detach().clone() for p in self.parameters], [p.grad for p in self.parameters]
        Ug = self.U(g)
        norm = torch.sqrt(sum((a * b).sum() for a, b in zip(g, Ug, strict=True)) + 1e-12)
        with torch.no_grad():
            for p, d in zip(self.parameters, Ug, strict=True):
                p += self.rho / norm * d
            for buffer, value in zip(self.model.buffers(), before, strict=True):
                buffer.copy_(value)
        self.run(passes, states)
        with torch.no_grad():
            for p, value in zip(self.parameters, centre, strict=True):
                p.copy_(value)
            for buffer, value in zip(self.model.buffers(), after, strict=True):
                buffer.copy_(value)
        torch.set_rng_state(random)
        self.clip(self.parameters)
        for p, d in zip(self.parameters, self.U([p.grad for p in self.parameters]), strict=True):
            p.grad = d
        self.clip_update(self.parameters)
        self.base.step()
        self.steps += 1
        return losses

    def train(self, batches, compute_loss, *, epochs=1, scheduler=None, to_geometry=lambda *batch: batch):
        """A step for each batch, and the scheduler after each epoch. Returns the losses at the centre."""
        losses = []
        for _ in range(epochs):
            for batch in batches:
                losses += self.step(partial(compute_loss, *batch), batch=to_geometry(*batch))
            if scheduler is not None:
                scheduler.step()
        return losses

    def run(self, passes, states=None):
        self.base.zero_grad()
        losses, seen = [], []
        for i, compute_loss in enumerate(passes):
            if states is not None:
                torch.set_rng_state(states[i])
            seen.append(torch.get_rng_state())
            loss = compute_loss()
            loss.backward()
            losses.append(loss.item())
        return losses, seen

    def learn(self, batch):
        if self.geometry is not None and self.steps % EVERY == 0:
            assert self.geometry.refresh(batch).accepted

    def U(self, gradients):
        if self.geometry is None:
            return gradients
        names = [name for name, _ in self.model.named_parameters()]
        Ug = self.geometry.metric.apply(dict(zip(names, gradients, strict=True)))
        return [Ug[name] for name in names]


def images(channels=3):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, channels, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator))
        for _ in range(4)
    ]


def convolutions(dropout=0.0):
    torch.manual_seed(0)
    body = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    return nn.Sequential(*body, nn.Dropout(dropout), nn.Linear(16, 10))


def seeded(loader, seed=1):
    """Whatever random numbers a loader draws, those of the passes are the reference's."""
    for i, batch in enumerate(loader):
        if i == 0:
            torch.manual_seed(seed)
        yield batch


def text(rows, seed=1):
    """Windows of a random text, and the same windows a token later."""
    tokens = torch.randint(VOCABULARY, (rows + LENGTH,), generator=torch.Generator().manual_seed(seed))
    return [(tokens[i : i + LENGTH], tokens[i + 1 : i + 1 + LENGTH]) for i in range(rows)]


class GPT(nn.Module):
    """As in nanoGPT and minGPT: returns logits and loss; without targets, the logits of the last position only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 8), nn.Embedding(LENGTH, 8)
        self.ln_1, self.ln_2, self.ln_f = (nn.LayerNorm(8) for _ in range(3))
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.1))
        self.lm_head = nn.Linear(8, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        x = x + self.c_proj(F.scaled_dot_product_attention(*self.c_attn(self.ln_1(x)).split(8, 2), is_causal=True))
        x = self.ln_f(x + self.mlp(self.ln_2(x)))
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self):
        decay, rest = ([p for p in self.parameters() if (p.dim() >= 2) is matrix] for matrix in (True, False))
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))


def gpt_logits(model, inputs):
    """The positions in the second place, where cross_entropy expects them."""
    return model(*inputs)[0].transpose(1, 2)


# nanoGPT: accumulation by hand with a batch fetched ahead, GradScaler, clipping, learning rate set in the groups


def nanogpt_batches():
    loader = iter(DataLoader(text(96), batch_size=4))
    return lambda: next(loader)


def nanogpt(method):
    model, get_batch = GPT(), nanogpt_batches()
    gradient_accumulation_steps = 3
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = model.configure_optimizers()
    optimizer = method(optimizer, model, rho=0.005, forward=gpt_logits)  # +
    passes = Passes(optimizer)  # +

    def forward_backward(X, Y):  # +
        _logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        scaler.scale(loss).backward()
        return loss  # +

    logged = []
    X, Y = get_batch()
    for iter_num in range(5):
        for param_group in optimizer.param_groups:
            param_group["lr"] = 1e-2 * (1 - iter_num / 10)
        for _ in range(gradient_accumulation_steps):
            loss = passes.run(forward_backward, X, Y)  # +
            X, Y = get_batch()
        passes.repeat_at_probe(batch=((X, Y), Y), grad_scaler=scaler)  # +
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        logged.append(loss.item() * gradient_accumulation_steps)
    return model, logged


def nanogpt_by_hand(method):
    model, get_batch = GPT(), nanogpt_batches()
    batches = [get_batch() for _ in range(16)]
    base = model.configure_optimizers()
    hand = ByHand(method, base, model, rho=0.005, clip=clip_to(0.5), forward=gpt_logits)
    logged = []
    for i in range(5):
        for group in base.param_groups:
            group["lr"] = 1e-2 * (1 - i / 10)
        micro_batches, (x, y) = batches[3 * i : 3 * i + 3], batches[3 * i + 3]
        losses = hand.step(*(lambda x=x, y=y: model(x, y)[1] / 3 for x, y in micro_batches), batch=((x, y), y))
        logged.append(losses[-1] * 3)
    return model, logged


# minGPT: a Trainer class that keeps the loss for its callbacks; clipping


def mingpt(method):
    model = GPT()
    optimizer = model.configure_optimizers()
    optimizer = method(optimizer, model, rho=0.005, forward=gpt_logits, max_norm=0.5)  # +
    logged = []
    model.train()
    for x, y in DataLoader(text(40), batch_size=8):

        def closure(x=x, y=y):  # +
            _logits, loss = model(x, y)
            model.zero_grad(set_to_none=True)
            loss.backward()
            return loss  # +

        loss = optimizer.step(closure, batch=((x, y), y))  # +
        logged.append(loss.item())
    return model, logged


def mingpt_by_hand(method):
    model = GPT()
    hand = ByHand(method, model.configure_optimizers(), model, rho=0.005, clip_update=clip_to(0.5), forward=gpt_logits)
    batches = DataLoader(text(40), batch_size=8)
    return model, hand.train(batches, lambda x, y: model(x, y)[1], to_geometry=lambda x, y: ((x, y), y))


# kuangliu/pytorch-cifar: the outputs are used after the step; BatchNorm; cosine schedule


def pytorch_cifar(method):
    net, trainloader = convolutions(), images()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    optimizer = method(optimizer, net, rho=0.1, loss_fn=criterion)  # +
    passes = Passes(optimizer)  # +
    scheduler = CosineAnnealingLR(optimizer, T_max=3)
    logged = []

    def forward_backward(inputs, targets):  # +
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        return outputs, loss  # +

    for _ in range(2):
        net.train()
        train_loss = correct = total = 0
        for inputs, targets in trainloader:
            optimizer.zero_grad()
            outputs, loss = passes.run(forward_backward, inputs, targets)  # +
            passes.repeat_at_probe(batch=(inputs, targets))  # +
            optimizer.step()
            train_loss += loss.item()
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
        logged += [train_loss / len(trainloader), correct / total]
        scheduler.step()
    return net, logged


def pytorch_cifar_by_hand(method):
    net, seen = convolutions(), []
    base = optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    hand = ByHand(method, base, net, rho=0.1)

    def compute_loss(x, y):
        outputs = net(x)
        seen.append((outputs.argmax(1) == y).double().mean().item())
        return F.cross_entropy(outputs, y)

    losses = hand.train(images(), compute_loss, epochs=2, scheduler=CosineAnnealingLR(base, T_max=3))
    correct = seen[::2]  # of the passes at the centre
    return net, [sum(values[i : i + 4]) / 4 for i in (0, 4) for values in (losses, correct)]


# davda54/sam: another SAM, in two calls, with BatchNorm statistics switched off in the second pass


def smooth_crossentropy(pred, gold, smoothing=0.1):
    one_hot = torch.full_like(pred, fill_value=smoothing / (pred.size(1) - 1))
    one_hot.scatter_(dim=1, index=gold.unsqueeze(1), value=1.0 - smoothing)
    return F.kl_div(F.log_softmax(pred, dim=1), one_hot, reduction="none").sum(-1)


def mean_smooth_crossentropy(pred, gold):
    return smooth_crossentropy(pred, gold).mean()


def set_running_stats(model, momentum):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum


def davda54(method):
    model, train_set = convolutions(), images()
    base = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)  # +
    optimizer = method(base, model, rho=0.05, loss_fn=mean_smooth_crossentropy)  # +
    scheduler = StepLR(optimizer, 1)
    logged = []
    for _ in range(2):
        model.train()
        for inputs, targets in train_set:
            set_running_stats(model, momentum=0.1)
            predictions = model(inputs)
            loss = smooth_crossentropy(predictions, targets)
            loss.mean().backward()
            optimizer.first_step(zero_grad=True, batch=(inputs, targets))  # +
            set_running_stats(model, momentum=0.0)
            smooth_crossentropy(model(inputs), targets).mean().backward()
            optimizer.second_step(zero_grad=True)
            logged.append(loss.mean().item())
        scheduler.step()
    return model, logged


def davda54_by_hand(method):
    model = convolutions()
    base = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    hand = ByHand(method, base, model, rho=0.05, loss_fn=mean_smooth_crossentropy)
    return model, hand.train(
        images(), lambda x, y: mean_smooth_crossentropy(model(x), y), epochs=2, scheduler=StepLR(base, 1)
    )


# pytorch/examples mnist: log-probabilities and nll_loss, dropout, Adadelta


def digits_network():
    torch.manual_seed(0)
    body = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(36, 10), nn.LogSoftmax(dim=1))


def mnist(method):
    model, train_loader = digits_network(), images(channels=1)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    optimizer = method(optimizer, model, rho=0.05, loss_fn=F.cross_entropy)  # + nll_loss has no curvature
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    logged = []
    for _ in range(2):
        model.train()
        for data, target in train_loader:

            def closure(data=data, target=target):  # +
                optimizer.zero_grad()
                output = model(data)
                loss = F.nll_loss(output, target)
                loss.backward()
                return loss  # +

            loss = optimizer.step(closure, batch=(data, target))  # +
            logged.append(loss.item())
        scheduler.step()
    return model, logged


def mnist_by_hand(method):
    model = digits_network()
    base = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(base, step_size=1, gamma=0.7)
    hand = ByHand(method, base, model, rho=0.05)
    return model, hand.train(images(channels=1), lambda x, y: F.nll_loss(model(x), y), epochs=2, scheduler=scheduler)


# pytorch/examples imagenet: the outputs are measured before the backward pass; BatchNorm and dropout


def imagenet(method):
    model, train_loader = convolutions(dropout=0.2), images()
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = method(optimizer, model, rho=0.075, loss_fn=criterion)  # +
    passes = Passes(optimizer)  # +
    logged = []

    def forward_backward(images, target):  # +
        output = model(images)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        return output, loss  # +

    model.train()
    for x, target in train_loader:
        output, loss = passes.run(forward_backward, x, target)  # +
        passes.repeat_at_probe(batch=(x, target))  # +
        assert criterion(output, target) == loss  # both at the centre
        logged.append(loss.item())
        optimizer.step()
    return model, logged


def imagenet_by_hand(method):
    model = convolutions(dropout=0.2)
    base = optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    hand = ByHand(method, base, model, rho=0.075)
    return model, hand.train(images(), lambda x, y: F.cross_entropy(model(x), y))


# pytorch/examples word_language_model: a hidden state carried from batch to batch, clipping, no optimizer


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.drop = nn.Dropout(0.2)
        self.encoder, self.rnn = nn.Embedding(VOCABULARY, 8), nn.LSTM(8, 8)
        self.decoder = nn.Linear(8, VOCABULARY)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden


def first_output(model, inputs):
    return model(*inputs)[0]


def rnn_batches():
    tokens = torch.randint(VOCABULARY, (21, 4), generator=torch.Generator().manual_seed(1))
    return [(tokens[i : i + 4], tokens[i + 1 : i + 5].view(-1)) for i in range(0, 20, 4)]


def word_language_model(method):
    model, criterion, lr = RNNModel(), nn.NLLLoss(), 2.0
    base = optim.SGD(model.parameters(), lr=lr)  # +
    optimizer = method(base, model, rho=0.05, forward=first_output)  # +
    passes = Passes(optimizer)  # +
    logged = []

    def forward_backward(data, hidden, targets):  # +
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        return loss, hidden  # +

    model.train()
    hidden = torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)
    for data, targets in rnn_batches():
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        batch = (data, hidden), targets  # +
        loss, hidden = passes.run(forward_backward, data, hidden, targets)  # +
        passes.repeat_at_probe(batch=batch)  # +
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()  # +
        logged.append(loss.item())
    return model, logged


def word_language_model_by_hand(method):
    model = RNNModel()
    base = optim.SGD(model.parameters(), lr=2.0)
    hand = ByHand(method, base, model, rho=0.05, clip=clip_to(0.25), forward=first_output)
    logged, hidden, seen = [], (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8)), []

    def compute_loss(data, hidden, targets):
        output, then = model(data, hidden)
        seen.append(tuple(h.detach() for h in then))
        return F.nll_loss(output, targets)

    for x, y in rnn_batches():
        logged += hand.step(partial(compute_loss, x, hidden, y), batch=((x, hidden), y))
        hidden, _at_probe = seen[-2:]
    return model, logged


# pytorch/examples vae: three outputs, a loss that is a sum, random numbers in the model


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc21, self.fc22 = nn.Linear(16, 12), nn.Linear(12, 3), nn.Linear(12, 3)
        self.fc3, self.fc4 = nn.Linear(3, 12), nn.Linear(12, 16)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 16)))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae_loss(recon_x, x, mu, logvar):
    BCE = F.binary_cross_entropy(recon_x, x.view(-1, 16), reduction="sum")
    return BCE - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def vae_outputs(model, x):
    """One tensor of outputs, as a geometry needs it."""
    return torch.cat(model(x), dim=1)


def mean_vae_loss(outputs, x):
    recon_x, mu, logvar = outputs.split((16, 3, 3), dim=1)
    return vae_loss(recon_x, x, mu, logvar) / len(x)


def vae_batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(8, 1, 4, 4, generator=generator) for _ in range(5)]


def vae(method):
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    optimizer = method(optimizer, model, rho=0.05, loss_fn=mean_vae_loss, forward=vae_outputs)  # +
    logged = []
    model.train()
    for data in vae_batches():

        def closure(data=data):  # +
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = vae_loss(recon_batch, data, mu, logvar)
            loss.backward()
            return loss  # +

        loss = optimizer.step(closure, batch=(data, data))  # +
        logged.append(loss.item() / len(data))
    return model, logged


def vae_by_hand(method):
    model = VAE()
    base = optim.Adam(model.parameters(), lr=1e-2)
    hand = ByHand(method, base, model, rho=0.05, early=True, loss_fn=mean_vae_loss, forward=vae_outputs)

    def compute_loss(x):
        recon_x, mu, logvar = model(x)
        return vae_loss(recon_x, x, mu, logvar)

    losses = hand.train([(x,) for x in vae_batches()], compute_loss, to_geometry=lambda x: (x, x))
    return model, [loss / 8 for loss in losses]


# Accelerate's nlp_example: accumulation by hand, with a step after micro-batches 0, 2, 4, ... of each epoch


def sentences():
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, VOCABULARY, (20, 5), generator=generator)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": i % 2} for i, row in enumerate(ids)]


def bert():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 8}
    return BertForSequenceClassification(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).train()


def nlp_example(method):
    accelerator = Accelerator(cpu=True)
    gradient_accumulation_steps = 2
    train_dataloader = DataLoader(sentences(), batch_size=4)
    model = bert()
    optimizer = optim.AdamW(params=model.parameters(), lr=1e-2)
    optimizer = method(optimizer, model, rho=0.05)  # +
    lr_scheduler = get_linear_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=1, num_training_steps=8)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    passes = llqr.integrations.accelerate.TwoPasses(accelerator, optimizer, model)  # +
    logged = []

    def compute_loss(batch):  # +
        outputs = model(**batch)
        loss = outputs.loss
        return loss / gradient_accumulation_steps

    for epoch in range(2):
        model.train()
        for step, batch in enumerate(seeded(train_dataloader, epoch)):
            last = step % gradient_accumulation_steps == 0  # +
            loss = passes.backward(compute_loss, batch, batch=batch, last=last)  # +
            logged.append(loss.item())
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model), logged


def nlp_example_by_hand(method):
    batches, model = list(DataLoader(sentences(), batch_size=4)), bert()
    base = optim.AdamW(model.parameters(), lr=1e-2)
    hand = ByHand(method, base, model, rho=0.05)
    scheduler = get_linear_schedule_with_warmup(base, num_warmup_steps=1, num_training_steps=8)
    logged = []
    for epoch in range(2):
        torch.manual_seed(epoch)
        for micro_batches in (batches[:1], batches[1:3], batches[3:]):
            passes = (lambda batch=batch: model(**batch).loss / 2 for batch in micro_batches)
            logged += hand.step(*passes, batch=micro_batches[-1])
            scheduler.step()
    return model, logged


# Lightning's transformer, in its Trainer and in Fabric


def transformer():
    torch.manual_seed(0)
    return Transformer(vocab_size=VOCABULARY, ninp=8, nhead=2, nhid=8, nlayers=1)


def transformer_outputs(model, inputs):
    return model(*inputs)


class LanguageModel(lightning.LightningModule):
    def __init__(self, method):
        super().__init__()
        self.method, self.model, self.logged = method, transformer(), []

    def training_step(self, batch, batch_idx):
        input, target = batch
        output = self.model(input, target)
        loss = F.nll_loss(output, target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        base = optim.SGD(self.parameters(), lr=0.1)
        return self.method(base, self.model, rho=0.05, forward=transformer_outputs)  # +

    def on_train_start(self):
        torch.manual_seed(1)

    def on_train_batch_end(self, *_):
        self.logged.append(self.trainer.callback_metrics["train_loss"].item())


def lightning_transformer(method):
    model = LanguageModel(method)
    two_passes = llqr.integrations.lightning.TwoPasses(lambda batch: (batch, batch[1].view(-1)))  # +
    settings = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    lightning.Trainer(
        gradient_clip_val=0.25,
        max_epochs=1,
        enable_model_summary=False,
        callbacks=[two_passes],  # +
        **settings,
    ).fit(model, DataLoader(text(32), batch_size=8))
    return model.model, model.logged


def fabric_language_model(method):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model, train_dataloader = transformer(), fabric.setup_dataloaders(DataLoader(text(32), batch_size=8))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    optimizer = method(optimizer, model, rho=0.05)  # +
    model, optimizer = fabric.setup(model, optimizer)
    passes = Passes(optimizer, fabric.world_size)  # +
    logged = []

    def forward_backward(input, target):  # +
        output = model(input, target)
        loss = F.nll_loss(output, target.view(-1))
        fabric.backward(loss)
        return loss  # +

    for input, target in seeded(train_dataloader):
        loss = passes.run(forward_backward, input, target)  # +
        passes.repeat_at_probe(batch=((input, target), target.view(-1)))  # +
        fabric.clip_gradients(model, optimizer, clip_val=0.25)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(loss.item())
    return model.module, logged


def transformer_by_hand(method, clip):
    model, batches = transformer(), list(DataLoader(text(32), batch_size=8))
    base = optim.SGD(model.parameters(), lr=0.1)
    hand = ByHand(method, base, model, rho=0.05, clip=clip, forward=transformer_outputs)
    torch.manual_seed(1)

    def compute_loss(x, y):
        return F.nll_loss(model(x, y), y.view(-1))

    return model, hand.train(batches, compute_loss, to_geometry=lambda x, y: ((x, y), y.view(-1)))


# Hugging Face's run_clm: the Trainer makes the optimizer, with a group that has no weight decay


def causal_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # the Trainer seeds in its own way
    return GPT2LMHeadModel(GPT2Config(**sizes, **ids, **off, attn_implementation="eager"))


def causal_data():
    return [{"input_ids": row, "labels": row} for row, _ in text(32)]


def training_arguments(folder):
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    return TrainingArguments(
        folder,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        weight_decay=0.1,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        train_sampling_strategy="sequential",
        **quiet,
    )


def run_clm(method):
    model = causal_model()

    class SAMTrainer(TwoPassTrainer):  # +
        def create_optimizer(self, *args, **kwargs):  # +
            base = super().create_optimizer(*args, **kwargs)  # +
            self.optimizer = method(base, model, rho=0.05, loss_fn=llqr.ShiftedCrossEntropy())  # +
            return self.optimizer  # +

    with tempfile.TemporaryDirectory() as folder:
        trainer = SAMTrainer(  # +
            model=model,
            args=training_arguments(folder),
            train_dataset=causal_data(),
            data_collator=default_data_collator,
        )
        trainer.train()
    return model, [row["loss"] for row in trainer.state.log_history if "loss" in row]


def run_clm_by_hand(method):
    model = causal_model()
    with tempfile.TemporaryDirectory() as folder:
        base = Trainer(model, training_arguments(folder)).create_optimizer()
    assert sorted(group["weight_decay"] for group in base.param_groups) == [0.0, 0.1]
    scheduler = get_linear_schedule_with_warmup(base, num_warmup_steps=0, num_training_steps=4)
    hand = ByHand(method, base, model, rho=0.05, clip=clip_to(0.5), loss_fn=llqr.ShiftedCrossEntropy())
    batches = list(DataLoader(causal_data(), batch_size=4))
    logged = []
    for micro_batches in (batches[i : i + 2] for i in range(0, 8, 2)):
        passes = (lambda b=b: model(**b, num_items_in_batch=2 * 4 * LENGTH).loss for b in micro_batches)
        losses = hand.step(*passes, batch=micro_batches[-1])
        logged.append(sum(losses))
        scheduler.step()
    return model, logged


LOOPS = [
    (nanogpt, nanogpt_by_hand),
    (mingpt, mingpt_by_hand),
    (pytorch_cifar, pytorch_cifar_by_hand),
    (davda54, davda54_by_hand),
    (mnist, mnist_by_hand),
    (imagenet, imagenet_by_hand),
    (word_language_model, word_language_model_by_hand),
    (vae, vae_by_hand),
    (nlp_example, nlp_example_by_hand),
    (lightning_transformer, partial(transformer_by_hand, clip=clip_to(0.25))),
    (fabric_language_model, partial(transformer_by_hand, clip=partial(nn.utils.clip_grad_value_, clip_value=0.25))),
    (run_clm, run_clm_by_hand),
]


@pytest.mark.parametrize("method", [sam, llqr_sam])
@pytest.mark.parametrize(("loop", "by_hand"), LOOPS, ids=[loop.__name__ for loop, _ in LOOPS])
def test_equals_a_loop_written_by_hand(loop, by_hand, method):
    model, logged = loop(method)
    other, centre = by_hand(method)
    torch.testing.assert_close(logged, centre, rtol=1e-7, atol=0)  # the Trainer computes its losses in float32
    # AdamW divides gradients that are zero but for rounding (those of an attention's key biases) by their size.
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-11)
