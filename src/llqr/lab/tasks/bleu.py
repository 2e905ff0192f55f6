"""BLEU as sacrebleu computes it, with the signature that says how."""

from collections.abc import Sequence
from typing import Any


class Bleu:
    """BLEU of translations against one reference each.

    Args:
        references: as they were written.
        lowercase: ignore case, as is needed where the translations are in lower case.
    """

    def __init__(self, references: Sequence[str], lowercase: bool) -> None:
        self._metric = _sacrebleu().metrics.BLEU(lowercase=lowercase, references=[list(references)])

    def score(self, translations: Sequence[str]) -> float:
        """From 0 to 100."""
        return float(self._metric.corpus_score(list(translations), None).score)

    @property
    def signature(self) -> str:
        """Which BLEU this is: tokenisation, case, smoothing and the version of sacrebleu."""
        return str(self._metric.get_signature())


def _sacrebleu() -> Any:
    try:
        import sacrebleu
    except ImportError as error:
        raise ModuleNotFoundError(
            "BLEU comes from sacrebleu, which is not installed; install it with: pip install 'llqr[lab]'."
        ) from error
    return sacrebleu
