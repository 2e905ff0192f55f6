"""LLQR+SAM in an Accelerate loop that accumulates gradients: `TwoPasses` takes the place of `accelerator.backward`.

python examples/accelerate_digits.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import llqr
from llqr.integrations.accelerate import TwoPasses

torch.manual_seed(0)
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
geometry = llqr.Geometry(model, cross_entropy, structure="e-kfac", every=50)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, llqr.LLQRSAM(base, geometry, rho=0.1), loader)
passes = TwoPasses(accelerator, optimizer, model)

for epoch in range(3):
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = passes.backward(lambda x, y: cross_entropy(model(x), y), images, labels, batch=(images, labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    print(f"epoch {epoch}: loss {float(loss):.3f}")
