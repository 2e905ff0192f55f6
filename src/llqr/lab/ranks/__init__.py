"""One run on several processes: who writes, how they agree, and how model and batches are shared out.

In reading order: `team` (who writes, how they agree), `strategy` (DDP and FSDP2) and `launch` (from torchrun to a
strategy).
"""
