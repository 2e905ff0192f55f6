"""Runs: what is asked for, carried out, and read back from disk."""
