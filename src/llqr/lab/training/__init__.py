"""The training loop and what it runs on: precision, captured passes, checkpoints, signals."""
