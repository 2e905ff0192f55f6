"""The command that prepares text: `llqr data`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from llqr.lab.cli import options
from llqr.lab.cli.options import PLAIN
from llqr.lab.cli.terminal import show
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.text import corpus, prepared
from llqr.lab.text.prepare import REASONS, PairSettings, StreamSettings, prepare_pairs, prepare_stream

app = typer.Typer(**PLAIN)


@app.command()
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the prepared text, such as iwslt14.")],
    source: Annotated[
        Path | None,
        typer.Option(
            help="A folder with train.de, train.en, valid.*, test.*, or IWSLT14's de-en as its archive unpacks."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Instead: one text file, for language modelling.")] = None,
    languages: Annotated[tuple[str, str], typer.Option(metavar="A B", help="Source and target.")] = ("de", "en"),
    lowercase: Annotated[bool, typer.Option(help="Lowercase the words.")] = True,
    longest: Annotated[int, typer.Option(min=1, help="Most words per side of a training pair.")] = 175,
    ratio: Annotated[float, typer.Option(min=1, help="Largest ratio of the lengths of both sides.")] = 1.5,
    merges: Annotated[int, typer.Option(min=0, help="Merges of the byte-pair encoding.")] = 10_000,
    valid_every: Annotated[
        int, typer.Option(min=3, help="Without valid.* files: hold out one in this many training pairs.")
    ] = 23,
    held_out: Annotated[
        float,
        typer.Option(min=0, max=0.4, help="With --text: the share of the lines for validation, and for the test."),
    ] = 0.02,
    data_dir: Annotated[Path, typer.Option(help="Folder in which NAME.pt is written.")] = Path("data"),
    as_json: options.Json = False,
) -> None:
    """Prepare text for translation or language modelling; files are plain, .xz or .gz.

    Text that was already prepared with the same settings is not prepared again. Dropped pairs are counted and printed.
    """
    if not prepared.NAME.fullmatch(name):
        raise ConfigurationError(f"NAME must consist of letters, digits, dots, dashes and underscores, got {name!r}.")
    if (source is None) == (text is None):
        raise ConfigurationError("Exactly one of --source and --text must be given.")
    if languages[0] == languages[1]:
        raise ConfigurationError(f"--languages must be two different languages, got {languages[0]} twice.")

    root = data_dir / name
    try:
        if text is not None:
            new = prepare_stream(text, StreamSettings(merges, held_out), root)
        elif source is not None:
            settings = PairSettings(
                languages, lowercase=lowercase, longest=longest, ratio=ratio, merges=merges, valid_every=valid_every
            )
            new = prepare_pairs(corpus.read(source, languages), settings, root)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise DataError(f"{'--source' if text is None else '--text'} {source or text}: {error}") from error
    facts, made = prepared.read(root, mmap=True), prepared.file_of(root)
    if as_json:
        told = {key: facts[key] for key in ("key", "settings", "vocabulary", "counts")}
        print(json.dumps({"file": str(made), "prepared_now": new, **told}, indent=1))
        return
    show(as_table(facts["counts"]))
    origin = "prepared now" if new else "prepared before"
    print(f"{made}: {origin}, {facts['vocabulary']['tokens']:,} tokens in the vocabulary")


def as_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """The counts, one column per split."""
    table = Table("", *(Column(split, justify="right") for split in counts), box=SIMPLE)
    for row in next(iter(counts.values())):
        label = f"dropped: {REASONS[row]}" if row in REASONS else row.replace("_", " ")
        table.add_row(label, *(f"{numbers[row]:,}" for numbers in counts.values()))
    return table
