"""The command that prepares text: `llqr data`."""

from pathlib import Path
from typing import Annotated

import typer

from llqr.lab.cli.options import PLAIN
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.text import corpus, prepared
from llqr.lab.text.prepared import PairSettings, prepare_pairs

app = typer.Typer(**PLAIN)


@app.command()
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the prepared text, such as iwslt14.")],
    source: Annotated[
        Path,
        typer.Option(
            help="A folder with train.de, train.en, valid.*, test.*, or IWSLT14's de-en as its archive unpacks."
        ),
    ],
    languages: Annotated[tuple[str, str], typer.Option(metavar="A B", help="Source and target.")] = ("de", "en"),
    lowercase: Annotated[bool, typer.Option(help="Lowercase the words.")] = True,
    merges: Annotated[int, typer.Option(min=0, help="Merges of the byte-pair encoding.")] = 10_000,
    data_dir: Annotated[Path, typer.Option(help="Folder in which NAME.pt is written.")] = Path("data"),
) -> None:
    """Prepare parallel text for translation; files are plain, .xz or .gz.

    Text that was already prepared with the same settings is not prepared again.
    """
    if not prepared.NAME.fullmatch(name):
        raise ConfigurationError(f"NAME must consist of letters, digits, dots, dashes and underscores, got {name!r}.")
    if languages[0] == languages[1]:
        raise ConfigurationError(f"--languages must be two different languages, got {languages[0]} twice.")
    root = data_dir / name
    try:
        settings = PairSettings(languages, lowercase=lowercase, merges=merges)
        new = prepare_pairs(corpus.read(source, languages), settings, root)
    except (OSError, ValueError) as error:
        raise DataError(f"--source {source}: {error}") from error
    facts = prepared.read(root, mmap=True)
    for split, counts in facts["counts"].items():
        print(f"{split}: {counts['read']:,} pairs read, {counts['kept']:,} kept")
    origin = "prepared now" if new else "prepared before"
    print(f"{prepared.file_of(root)}: {origin}, {facts['vocabulary']['tokens']:,} tokens in the vocabulary")
