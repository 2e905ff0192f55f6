"""Every example runs, in its quick form."""

import json
import random
from pathlib import Path

import pytest

import forked

EXAMPLES = Path(__file__).parent.parent / "examples"
FINE_TUNING = "fine_tune_sst.py"  # needs data and a network
QUICK = {"digits.py": ["--epochs", "1", "--seeds", "1"], "own_experiment.py": ["1", "1"]}


LONG = {
    "huggingface_gpt2.py", "accelerate_digits.py", "lightning_digits.py", "pothole.py", "digits.py", "own_experiment.py"
}  # fmt: skip
SCRIPTS = [
    pytest.param(path.name, marks=[pytest.mark.slow] if path.name in LONG else [])
    for path in sorted(EXAMPLES.glob("*.py"))
    if path.name != FINE_TUNING
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_example(script, tmp_path):
    run = forked.run(EXAMPLES / script, *QUICK.get(script, []), folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()


@pytest.mark.slow
def test_fine_tuning_learns_the_sign_of_words(tmp_path):
    """On sentences whose words are all good or all bad, with a tiny network that was never trained."""
    from transformers import BertConfig, BertModel, BertTokenizer

    draw, words = random.Random(0), {"0": ["bad", "dull", "poor"], "1": ["good", "fine", "warm"]}
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words["0"], *words["1"]]
    (tmp_path / "words.txt").write_text("\n".join(known))
    for part, count in (("train", 256), ("dev", 40), ("test", 40)):
        labels = [draw.choice("01") for _ in range(count)]
        rows = [f"{label} {' '.join(draw.choices(words[label], k=draw.randint(2, 9)))}\n" for label in labels]
        (tmp_path / f"binary.{part}.txt").write_text("".join(rows))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=11, **sizes)).half().save_pretrained(tmp_path / "tiny")
    BertTokenizer(str(tmp_path / "words.txt")).save_pretrained(tmp_path / "tiny")

    arguments = ["--data", ".", "--model", "tiny", "--out", "out.jsonl"]
    for method, lr in (("adamw", "1e-2"), ("llqr+sam-every-5", "1e-2"), ("sgd+sam", "0")):
        run = forked.run(EXAMPLES / FINE_TUNING, *arguments, "--method", method, "--lr", lr, folder=tmp_path)
        assert run.returncode == 0, run.stderr
    plain, learned, sgd = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert len(plain["validation"]) == len(learned["validation"]) == len(sgd["validation"]) == 5
    assert min(plain["test"], learned["test"]) > 0.9
    assert len(set(sgd["validation"])) == 1  # SGD does not move with a rate of zero
    assert (plain["refreshes"], learned["refreshes"], sgd["refreshes"]) == (0, 1, 0)
