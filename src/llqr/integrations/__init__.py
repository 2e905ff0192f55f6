"""The common training frameworks: `llqr.integrations.lightning`, `.transformers`, `.accelerate`.

Nothing is imported here, because each of them needs its framework.
"""
