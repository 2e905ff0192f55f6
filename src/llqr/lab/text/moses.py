"""Tokenisation and detokenisation by Moses' rules, with sacremoses."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llqr.lab.extras import extra


def tokenise(text: str, language: str) -> str:
    """The words of ``text`` separated by spaces; what Moses treats as markup is escaped, as its script does."""
    return str(_moses("MosesTokenizer", language).tokenize(text, return_str=True))


def detokenise(words: Sequence[str], language: str) -> str:
    """The plain text of escaped ``words``."""
    return str(_moses("MosesDetokenizer", language).detokenize(list(words)))


@lru_cache
def _moses(tool: str, language: str) -> Any:
    return getattr(extra("sacremoses", "Tokenisation needs sacremoses"), tool)(lang=language)
