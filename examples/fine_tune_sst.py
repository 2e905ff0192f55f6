"""Fine-tune a pretrained classifier on the Stanford Sentiment Treebank, and append the accuracies to a file.

python examples/fine_tune_sst.py --data sst --model minilm --task binary --method llqr+sam --rho 0.02 --lr 5e-5
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, TrainingArguments

import llqr
from llqr.integrations.transformers import TwoPassTrainer

parser = argparse.ArgumentParser(description="--data has TASK.train.txt, .dev.txt, .test.txt; --model is a folder")
defaults = {"data": "sst", "model": "minilm", "rho": 0.02, "lr": 5e-5, "seed": 0, "out": "results.jsonl"}
for name, value in defaults.items():
    parser.add_argument(f"--{name}", type=type(value), default=value)
parser.add_argument("--task", choices=("binary", "fine"), default="binary")
with_adamw = ("adamw", "sam", "llqr", "llqr+sam", "llqr+sam-every-5")
parser.add_argument("--method", choices=(*with_adamw, "sgd", "sgd+sam", "sgd+llqr", "sgd+llqr+sam"), required=True)
args, cuda = parser.parse_args(), torch.cuda.is_available()
transformers.set_seed(args.seed)
pad, sets = DataCollatorWithPadding(AutoTokenizer.from_pretrained(args.model)), {}
for part in ("train", "dev", "test"):
    rows = [line.split(" ", 1) for line in Path(args.data, f"{args.task}.{part}.txt").read_text().strip().split("\n")]
    tokens = pad.tokenizer([text for _, text in rows], truncation=True, max_length=64)["input_ids"]
    sets[part] = [{"input_ids": ids, "label": int(row[0])} for ids, row in zip(tokens, rows, strict=True)]
head = {"num_labels": 2 if args.task == "binary" else 5, "dtype": torch.float32, "attn_implementation": "eager"}
model = AutoModelForSequenceClassification.from_pretrained(args.model, **head).to("cuda" if cuda else "cpu")
kind, own = ("SGD", {"momentum": 0.9}) if "sgd" in args.method else ("AdamW", {"weight_decay": 0.01})
opt = base = getattr(torch.optim, kind)(model.parameters(), lr=args.lr, **own)
probe, refreshes = {"rho": args.rho, "norm": "metric", "every": 5 if "every-5" in args.method else 1}, []
if "llqr" in args.method:
    blocks = {"*embeddings*": "diagonal", "*": "e-kfac"}  # a table has a row for every word
    fast = {"runtime": llqr.Runtime(autocast=torch.bfloat16)} if cuda else {}
    geometry = llqr.Geometry(model, cross_entropy, structure=blocks, every=40, on_refresh=refreshes.append, **fast)
    geometry.batches = DataLoader(sets["train"], 128, shuffle=True, collate_fn=pad)
    opt = llqr.LLQRSAM(base, geometry, **probe) if "sam" in args.method else llqr.LLQR(base, geometry)
elif "sam" in args.method:
    opt = llqr.SAM(base, **probe)
options = {"num_train_epochs": 5, "per_device_train_batch_size": 32, "per_device_eval_batch_size": 256, "bf16": cuda}
options |= {"warmup_steps": 0.1, "eval_strategy": "epoch", "save_strategy": "no", "report_to": [], "seed": args.seed}
arguments = TrainingArguments(**options, use_cpu=not cuda, disable_tqdm=True, logging_strategy="no")
score = {"compute_metrics": lambda seen: {"accuracy": float((seen[0].argmax(-1) == seen[1]).mean())}}
data = {"train_dataset": sets["train"], "eval_dataset": sets["dev"], "data_collator": pad}
trainer = TwoPassTrainer(model, arguments, optimizers=(opt, None), **data, **score)
result = {key: vars(args)[key] for key in ("task", "method", "rho", "lr", "seed")}
result |= {"seconds": trainer.train().metrics["train_runtime"], "refreshes": len(refreshes)}
result["change"] = refreshes[-1].change if refreshes else None  # |Ug - g| / |g| at the last refresh
result["validation"] = [log["eval_accuracy"] for log in trainer.state.log_history if "eval_accuracy" in log]
result["test"] = trainer.evaluate(sets["test"])["eval_accuracy"]  # after the last epoch
result["versions"] = {module.__name__: str(module.__version__) for module in (llqr, torch, transformers)}
result["device"] = torch.cuda.get_device_name() if cuda else "cpu"
with Path(args.out).open("a") as file:
    print(json.dumps(result), file=file)
