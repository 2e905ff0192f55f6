"""Runs: what is asked for, written down, and read back from disk."""
