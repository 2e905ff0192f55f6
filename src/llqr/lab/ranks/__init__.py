"""One run on several processes: who writes, how they agree, and how model and batches are shared out."""
