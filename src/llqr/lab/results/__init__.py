"""Measured runs that are kept, and the tables made from them."""
