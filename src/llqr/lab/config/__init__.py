"""Recipes: everything that decides a run, read strictly from TOML."""
