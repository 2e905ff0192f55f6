"""Finding and reading parallel text: compression, alignment, the layout of IWSLT14, and errors that name bad files."""

import gzip
import lzma

import pytest

from llqr.lab.text import corpus
from llqr.lab.text.corpus import TEST_SETS, read_lines
from parallel_text import write_folder

PAIR = ("de", "en")


def compress(path, ending):
    """Replace a file by its compressed form."""
    made = path.with_name(path.name + ending)
    made.write_bytes((lzma if ending == ".xz" else gzip).compress(path.read_bytes()))
    path.unlink()
    return made


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "one\u2028still one\x85and\x0bhere\x0c.\r\n\nthree",
            ["one\u2028still one\x85and\x0bhere\x0c.\r", "", "three"],
        ),
        ("a\nb\n", ["a", "b"]),
        ("a\nb", ["a", "b"]),
        ("\ufeffa\n", ["a"]),
        ("", []),
    ],
)
def test_lines_end_at_line_feeds_only(tmp_path, content, expected):
    (tmp_path / "text").write_bytes(content.encode())
    assert read_lines(tmp_path / "text") == [line.encode() for line in expected]


@pytest.mark.parametrize("ending", [".xz", ".gz"])
def test_compressed_files_read_like_plain_ones(tmp_path, ending):
    plain = corpus.read(write_folder(tmp_path), PAIR)
    for path in list(tmp_path.iterdir()):
        compress(path, ending)
    assert corpus.read(tmp_path, PAIR) == plain
    path = tmp_path / f"train.de{ending}"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"train\.de\.\w+ is damaged"):
        corpus.read(tmp_path, PAIR)


def test_misaligned_files_are_refused_with_their_counts(tmp_path):
    write_folder(tmp_path)
    path = tmp_path / "train.en"
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(ValueError, match="train are not aligned: 300 lines in the source and 299 in the target"):
        corpus.read(tmp_path, PAIR)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="source must be a folder"):
        corpus.read(tmp_path / "nowhere", PAIR)
    with pytest.raises(FileNotFoundError, match=r"train\.de is missing"):
        corpus.read(tmp_path, PAIR)
    (write_folder(tmp_path) / "valid.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"valid\.de is missing"):
        corpus.read(tmp_path, PAIR)


TRAINING = """<url>http://www.ted.com/talks/one</url>
<keywords>talks, {language}</keywords>
<speaker>Somebody</speaker>
<talkid>1</talkid>
<title>Title in {language}</title>
<description>Describes it. in {language}</description>
First sentence in {language} with a ’.
 Second <b>sentence</b> in {language}
<url>http://www.ted.com/talks/two</url>
Third <title> </description> in {language}
"""
KEPT = """<speaker>Somebody</speaker>
Title in {language}
Describes it. in {language}
First sentence in {language} with a ’.
 Second <b>sentence</b> in {language}
Third   in {language}
"""
XML = """<?xml version="1.0" encoding="UTF-8"?>
<mteval><refset><doc docid="1">
<url>http://www.ted.com</url>
<title>Not a segment</title>
<seg id="1">  {name}’s first &amp; best in {language}  </seg>
  <seg id="2">{name} second</seg>
</doc></refset></mteval>
"""


@pytest.fixture
def iwslt(tmp_path):
    """A small copy of IWSLT14 as distributed, with additional files that must be ignored."""
    folder = tmp_path / "out" / "de-en"
    folder.mkdir(parents=True)
    for language in PAIR:
        (folder / f"train.tags.de-en.{language}").write_text(TRAINING.format(language=language))
        for name in (*TEST_SETS, "TED.tst2099"):
            made = XML.format(name=name, language=language)
            (folder / f"IWSLT14.{name}.de-en.{language}.xml").write_text(made)
    (folder / "README").write_text("not text")
    return folder


def test_iwslt14_is_what_fairseqs_script_keeps(iwslt):
    for place in (iwslt, iwslt.parent):
        found = corpus.read(place, PAIR)
        assert list(found) == ["train", "test"]
        for side, language in zip(found["train"], PAIR, strict=True):
            assert b"\n".join(side).decode() + "\n" == KEPT.format(language=language)
        order = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
        expected = [line for name in order for line in (f"{name}'s first &amp; best in en", f"  {name} second")]
        assert [line.decode() for line in found["test"][1]] == expected
    assert corpus.read(iwslt, ("en", "de"))["test"][0] == found["test"][1]


def test_an_incomplete_iwslt14_names_what_is_missing(iwslt):
    (iwslt / "IWSLT14.TED.tst2011.de-en.en.xml").unlink()
    with pytest.raises(FileNotFoundError, match=r"IWSLT14\.TED\.tst2011\.de-en\.en\.xml is missing"):
        corpus.read(iwslt, PAIR)
