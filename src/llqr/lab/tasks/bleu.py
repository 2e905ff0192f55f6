"""BLEU as sacrebleu computes it, with the signature that says how."""

from collections.abc import Sequence

from llqr.lab.extras import extra


class Bleu:
    """BLEU of translations against one reference each, as it was written.

    ``lowercase`` ignores case, as is needed where the translations are in lower case.
    """

    def __init__(self, references: Sequence[str], lowercase: bool) -> None:
        sacrebleu = extra("sacrebleu", "BLEU comes from sacrebleu")
        self._metric = sacrebleu.metrics.BLEU(lowercase=lowercase, references=[list(references)])

    def score(self, translations: Sequence[str]) -> float:
        """From 0 to 100."""
        return float(self._metric.corpus_score(list(translations), None).score)

    @property
    def signature(self) -> str:
        """Which BLEU this is: tokenisation, case, smoothing and the version of sacrebleu."""
        return str(self._metric.get_signature())
