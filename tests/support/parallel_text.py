"""Small parallel corpora for the tests."""

import random
from pathlib import Path

GERMAN = "der hund frisst die katze und läuft schnell über das große haus im alten garten nicht wahr Straße"
ENGLISH = "the dog eats a cat and runs fast over that big house in an old garden isn't it so"
WORDS = {"de": GERMAN.split(), "en": ENGLISH.split()}


def sentences(language: str, count: int, seed: int = 0) -> list[str]:
    """Sentences of 3 to 12 words; with the same seed those of two languages have the same number of words."""
    lengths, words = random.Random(seed), random.Random(f"{language} {seed}")
    made = [" ".join(words.choices(WORDS[language], k=lengths.randint(3, 12))) for _ in range(count)]
    return [sentence[0].upper() + sentence[1:] + "." for sentence in made]


def write_folder(folder: Path, train: int = 300, valid: int = 20, test: int = 20) -> Path:
    """``train.de``, ``train.en`` and so on; a split of no sentences has no files."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate({"train": train, "valid": valid, "test": test}.items()):
        for language in WORDS:
            if count:
                text = "".join(line + "\n" for line in sentences(language, count, seed))
                (folder / f"{split}.{language}").write_text(text)
    return folder
