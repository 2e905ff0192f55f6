"""LLQR+SAM in Hugging Face's Trainer: a tiny GPT-2 learns to count.

python examples/huggingface_gpt2.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import llqr
from llqr.integrations.transformers import TwoPassTrainer

torch.manual_seed(0)
sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 32, "n_layer": 2, "n_head": 2}
# The exact derivatives of a refresh need attention that is not fused.
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager"))
counting = (torch.arange(8) + torch.randint(16, (256, 1))) % 16
data = [{"input_ids": row, "labels": row} for row in counting]

geometry = llqr.Geometry(model, llqr.ShiftedCrossEntropy(), structure="e-kfac", every=10)
optimizer = llqr.LLQRSAM(torch.optim.AdamW(model.parameters(), lr=3e-3), geometry, rho=0.005)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        num_train_epochs=4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        logging_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    TwoPassTrainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train()
print(geometry.summary().splitlines()[0])
