"""Hugging Face's Trainer with a tiny language model and a classifier, beside loops written by hand."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
)

import llqr
from accelerators import forget_accelerators
from llqr.integrations.transformers import TwoPassTrainer
from small_trainings import assert_same

ROWS, BATCH = 16, 4
pytestmark = pytest.mark.filterwarnings("ignore")


def language_model():
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "n_positions": 6, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager"))


def classifier():
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8, num_labels=3, attn_implementation="eager")
    )


def tokens():
    ids = torch.randint(1, 11, (ROWS, 6), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": row, "labels": row} for row in ids]


def sentences():
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(1, 11, (ROWS, 6), generator=generator), torch.randint(3, (ROWS,), generator=generator)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sam(model):
    return llqr.SAM(adamw(model), rho=0.1)


def llqr_sam(model):
    loss_fn = llqr.ShiftedCrossEntropy() if isinstance(model, GPT2LMHeadModel) else cross_entropy
    geometry = llqr.Geometry(model, loss_fn, every=2, inner=llqr.Inner(steps=3, lr=0.05))
    return llqr.LLQRSAM(adamw(model), geometry, rho=0.1)


class Seeded(TwoPassTrainer):
    """Fixes dropout's masks before each micro-batch, as the reference does; the second pass must then repeat them."""

    scaler = None

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.scaler is not None:  # what fp16=True sets, which Accelerate refuses on a CPU
            self.accelerator.native_amp, self.accelerator.scaler = True, self.scaler
            self.accelerator.state._mixed_precision = "fp16"

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        torch.manual_seed(self.state.global_step)
        return batches, items


def trainer(model, opt, data, folder, accumulate=1, kind=Seeded, **settings):
    forget_accelerators()
    common = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": accumulate,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
    }
    return kind(
        model,
        TrainingArguments(str(folder), **common | settings),
        train_dataset=data,
        optimizers=(opt, None),
    )


def in_two_calls(model, opt, data, *, accumulate=1, epochs=2, clip=None, scaler=None, autocast=None):
    """The reference: the models' own losses, in the two-call form. Returns the loss of each step at the centre."""
    micro_batches = [_collated(data[i : i + BATCH]) for i in range(0, ROWS, BATCH)] * epochs
    model.train()
    losses = []
    for start in range(0, len(micro_batches), accumulate):
        window = micro_batches[start : start + accumulate]

        def forward_backward(window=window, seed=start // accumulate):
            torch.manual_seed(seed)
            opt.zero_grad()
            total = 0.0
            labels = sum((one["labels"] != -100).sum() for one in window)
            for one in window:
                # As the Trainer: a language model's loss is divided by all labels of the step, and the means of a
                # classifier's passes are added up.
                given = {} if one["labels"].ndim == 1 else {"num_items_in_batch": labels}
                with nullcontext() if autocast is None else torch.autocast("cpu", autocast):
                    logits = model(input_ids=one["input_ids"]).logits
                loss = model.loss_function(
                    labels=one["labels"],
                    config=model.config,
                    vocab_size=model.config.vocab_size,
                    **given,
                    **{"pooled_logits" if not given else "logits": logits.float()},
                )
                (loss if scaler is None else scaler.scale(loss)).backward()
                total += loss.detach()
            return total

        losses.append(float(forward_backward()))
        opt.first_step(batch=window[-1], grad_scaler=scaler)
        forward_backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.second_step(grad_scaler=scaler)
        if scaler is not None:
            scaler.update()
    return losses


def _collated(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


CASES = {
    "language model": (language_model, tokens),
    "classifier": (classifier, sentences),
}


def logged_losses(fit):
    return [entry["loss"] for entry in fit.state.log_history if "loss" in entry]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("method", "accumulate", "clip"), [(sam, 1, None), (llqr_sam, 2, None), (llqr_sam, 2, 0.01)])
def test_the_trainer_is_the_loop_written_by_hand(case, method, accumulate, clip, tmp_path):
    make, data = CASES[case]
    model, other = make(), make()
    opt = method(model)
    fit = trainer(model, opt, data(), tmp_path, accumulate, max_grad_norm=clip or 0.0)
    fit.train()
    losses = in_two_calls(other, method(other), data(), accumulate=accumulate, clip=clip)
    assert opt.steps == fit.state.global_step == 2 * ROWS / BATCH / accumulate
    assert_same(model, other, rtol=1e-6, atol=1e-6)
    assert logged_losses(fit) == pytest.approx(losses, rel=1e-5)


def test_sam_without_any_part_of_llqr(tmp_path):
    model, other = classifier(), classifier()
    trainer(model, sam(model), sentences(), tmp_path).train()
    base, parameters = adamw(other), list(other.parameters())
    other.train()
    micro_batches = [_collated(sentences()[i : i + BATCH]) for i in range(0, ROWS, BATCH)] * 2
    for step, one in enumerate(micro_batches):
        torch.manual_seed(step)
        base.zero_grad()
        other(**one).loss.backward()
        centre = [p.detach().clone() for p in parameters]
        norm = torch.sqrt(sum(p.grad.square().sum() for p in parameters if p.grad is not None) + 1e-12)
        with torch.no_grad():
            for p in parameters:
                if p.grad is not None:
                    p += 0.1 * p.grad / norm
        torch.manual_seed(step)
        base.zero_grad()
        other(**one).loss.backward()
        with torch.no_grad():
            for p, saved in zip(parameters, centre, strict=True):
                p.copy_(saved)
        base.step()
    assert_same(model, other, rtol=1e-5, atol=1e-6)


def test_bf16(tmp_path):
    model, other = language_model(), language_model()
    trainer(model, llqr_sam(model), tokens(), tmp_path, 2, bf16=True).train()
    in_two_calls(other, llqr_sam(other), tokens(), accumulate=2, autocast=torch.bfloat16)
    assert_same(model, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_fp16(tmp_path, clip):
    def cpu_scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**28, growth_interval=3)  # the first steps overflow

    class Scaled(Seeded):
        scaler = cpu_scaler()

    model, other, theirs = language_model(), language_model(), cpu_scaler()
    settings = {"max_grad_norm": clip or 0.0, "num_train_epochs": 8}
    trainer(model, llqr_sam(model), tokens(), tmp_path, 2, Scaled, **settings).train()
    settings = {"autocast": torch.float16, "scaler": theirs, "clip": clip, "epochs": 8}
    in_two_calls(other, llqr_sam(other), tokens(), accumulate=2, **settings)
    assert Scaled.scaler.get_scale() == theirs.get_scale() < 2.0**28
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_schedules_of_rho_follow_the_steps(tmp_path):
    def method(model):
        return llqr.SAM(adamw(model), rho=lambda step: 0.02 * step, start_after=2)

    model, other = classifier(), classifier()
    opt = method(model)
    trainer(model, opt, sentences(), tmp_path).train()
    in_two_calls(other, method(other), sentences())
    assert opt.steps == 8
    assert_same(model, other, rtol=1e-6, atol=1e-6)


def test_resume_is_bit_equal(tmp_path):
    def fit(folder, resume=None):
        model = language_model()
        opt = llqr_sam(model)
        saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "num_train_epochs": 3}
        one = trainer(model, opt, tokens(), folder, 2, TwoPassTrainer, **saving)
        one.train(resume_from_checkpoint=resume)
        return model, opt

    whole, _ = fit(tmp_path / "whole")
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {"checkpoint-5", "checkpoint-6"}
    rest, opt = fit(tmp_path / "rest", resume=str(tmp_path / "whole" / "checkpoint-5"))
    assert opt.steps == 6
    assert_same(whole, rest)


def test_the_trainer_finds_a_batch_size(tmp_path):
    """The micro-batches of the training that did not fit are not repeated in the first step of the one that does."""
    sizes = []

    class Small(TwoPassTrainer):
        def compute_loss(self, model, inputs, *args, **settings):
            sizes.append(len(inputs["labels"]))
            if sizes == [8, 8]:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, *args, **settings)

    model = classifier()
    settings = {"per_device_train_batch_size": 8, "auto_find_batch_size": True, "num_train_epochs": 1}
    trainer(model, sam(model), sentences(), tmp_path, 2, Small, **settings).train()
    assert sizes == [8, 8, *[7, 7] * 2, *[2] * 2]


def test_another_optimizer_passes_through(tmp_path):
    model, other = classifier(), classifier()
    trainer(model, adamw(model), sentences(), tmp_path, 2).train()
    trainer(other, llqr.SAM(adamw(other), rho=0.0), sentences(), tmp_path, 2).train()
    assert_same(model, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("model", "data"), [(language_model, tokens), (classifier, sentences)])
def test_the_measured_loss_is_the_one_that_the_trainer_logs(model, data, tmp_path):
    network = model()
    opt = llqr.SAM(adamw(network), rho=0.1, measure=True)
    run = trainer(network, opt, data(), tmp_path, accumulate=4)
    run.train()
    logged = [log["loss"] for log in run.state.log_history if "loss" in log]
    assert float(opt.last["loss"]) == pytest.approx(logged[-1], rel=1e-3)  # logs are rounded
