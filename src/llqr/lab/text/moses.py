"""Tokenisation and detokenisation by Moses' rules, with sacremoses."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llqr.lab.extras import extra


def tokenise(text: str, language: str) -> str:
    """The words of ``text`` separated by spaces; what Moses treats as markup is escaped, as its script does."""
    return str(_tokeniser(language).tokenize(text, return_str=True))


def detokenise(words: Sequence[str], language: str) -> str:
    """The plain text of escaped ``words``."""
    return str(_detokeniser(language).detokenize(list(words)))


@lru_cache
def _tokeniser(language: str) -> Any:
    return _sacremoses().MosesTokenizer(lang=language)


@lru_cache
def _detokeniser(language: str) -> Any:
    return _sacremoses().MosesDetokenizer(lang=language)


def _sacremoses() -> Any:
    return extra("sacremoses", "Tokenisation needs sacremoses")
