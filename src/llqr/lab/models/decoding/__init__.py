"""Beam search with a trained decoder."""
