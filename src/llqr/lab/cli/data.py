"""The command that prepares text: `llqr data`."""

import json
import lzma
import tarfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from llqr.lab.cli import options
from llqr.lab.cli.dataclass_options import Fields, options_from_dataclasses
from llqr.lab.cli.options import PLAIN
from llqr.lab.cli.terminal import show
from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.progress import Display
from llqr.lab.stop import Stop
from llqr.lab.text import corpus, prepared_folder
from llqr.lab.text.cleaning import REASONS
from llqr.lab.text.prepare import ParallelTextSettings, prepare
from llqr.lab.text.stages import Stages
from llqr.lab.text.token_stream import StreamSettings, prepare_stream

TwoFiles = tuple[Path, Path]
PAIRS, STREAM = ParallelTextSettings(corpus.DIRECTION), StreamSettings()
app = typer.Typer(**PLAIN)


@app.command()
@options_from_dataclasses
def data(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the prepared text, such as iwslt14.")],
    source: Annotated[
        Path | None,
        typer.Option(help="IWSLT14's de-en.tgz or its folder, or a folder with train.de, train.en, valid.*, test.*."),
    ] = None,
    train: Annotated[TwoFiles | None, typer.Option(metavar="A B", help="Instead: two parallel files.")] = None,
    valid: Annotated[TwoFiles | None, typer.Option(metavar="A B", help="With --train: the validation files.")] = None,
    test: Annotated[TwoFiles | None, typer.Option(metavar="A B", help="With --train: the test files.")] = None,
    text: Annotated[Path | None, typer.Option(help="Instead: one text file, for language modelling.")] = None,
    languages: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Source and target (default: de en; with --train the endings of the files)."),
    ] = None,
    pairs: Annotated[ParallelTextSettings, Fields(omit=("languages", "shortest"))] = PAIRS,
    stream: Annotated[StreamSettings, Fields(omit=("merges",))] = STREAM,
    data_dir: Annotated[Path, typer.Option(help="Folder in which the folder NAME is made.")] = Path("data"),
    processes: Annotated[int | None, typer.Option(min=1, help="Processes (default: one per core).")] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Prepare text for translation or language modelling; files are plain, .xz or .gz.

    Text that was already prepared with the same settings is not prepared again. Dropped pairs are counted and printed.
    """
    if not prepared_folder.NAME.fullmatch(name):
        raise ConfigurationError(f"NAME must consist of letters, digits, dots, dashes and underscores, got {name!r}.")
    if [source, train, text].count(None) != 2:
        raise ConfigurationError("Exactly one of --source, --train and --text must be given.")
    if train is None and (valid is not None or test is not None):
        raise ConfigurationError("--valid and --test go with --train.")
    started = time.monotonic()
    try:
        with Stop() as stop, Display(quiet=quiet) as display:
            stages = Stages(display, stop)
            if text is not None:
                settings = replace(stream, merges=pairs.merges)
                made, new = prepare_stream(text, settings, data_dir / name, stages=stages)
            else:
                files = {"train": train, "valid": valid, "test": test}
                raw = corpus.from_files(files, languages) if source is None else corpus.from_folder(source, languages)
                own = replace(pairs, languages=raw.languages)
                made, new = prepare(raw, own, data_dir / name, stages=stages, processes=processes)
    except (EOFError, OSError, ValueError, ModuleNotFoundError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        given = ["--train", *train] if train else ["--source", source] if source else ["--text", text]
        raise DataError(f"{' '.join(map(str, given))}: {error}") from error
    _tell(made, new, time.monotonic() - started, as_json=as_json)


def _tell(made: Path, new: bool, seconds: float, *, as_json: bool) -> None:
    """Print what was counted and where the prepared text is."""
    manifest = json.loads((made / prepared_folder.MANIFEST).read_text())
    if as_json:
        facts = {name: manifest[name] for name in ("key", "settings", "vocabulary", "counts")}
        print(json.dumps({"folder": str(made), "prepared_now": new, "seconds": seconds, **facts}, indent=1))
        return
    show(as_table(manifest["counts"]))
    origin = f"prepared in {seconds:.0f} s" if new else "prepared before"
    print(f"{made}: {origin}, {manifest['vocabulary']['tokens']:,} tokens in the vocabulary")


def as_table(counts: Mapping[str, Mapping[str, int]]) -> Table:
    """The counts, one column per split."""
    table = Table("", *(Column(split, justify="right") for split in counts), box=SIMPLE)
    for row in next(iter(counts.values())):
        label = f"dropped: {REASONS[row]}" if row in REASONS else row.replace("_", " ")
        table.add_row(label, *(f"{numbers[row]:,}" for numbers in counts.values()))
    return table
