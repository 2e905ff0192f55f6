"""Finding and reading parallel text: compression, alignment, the layout of IWSLT14, and errors that name bad files."""

import gzip
import lzma
import re
import tarfile

import pytest

from llqr.lab.text import corpus, iwslt, lines
from parallel_text import write_folder


def compress(path, ending):
    """Replace a file by its compressed form."""
    made = path.with_name(path.name + ending)
    made.write_bytes((lzma if ending == ".xz" else gzip).compress(path.read_bytes()))
    path.unlink()
    return made


def test_lines_end_at_line_feeds_only():
    content = "one\u2028still one\x85and\x0bhere\x0c.\r\n\nthree".encode()
    assert lines.split_lines(content) == ["one\u2028still one\x85and\x0bhere\x0c.\r".encode(), b"", b"three"]
    assert lines.split_lines(b"a\nb\n") == lines.split_lines(b"a\nb") == [b"a", b"b"]
    assert lines.split_lines(b"\xef\xbb\xbfa\n") == [b"a"]
    assert lines.split_lines(b"") == []


def test_a_line_that_is_not_utf8_has_no_text():
    assert lines.decode("  Größe \r".encode()) == "  Größe \r"
    assert lines.decode("Größe".encode("latin-1")) is None


@pytest.mark.parametrize("ending", [".xz", ".gz"])
def test_compressed_files_read_like_plain_ones(tmp_path, ending):
    plain = corpus.from_folder(write_folder(tmp_path))
    for path in list(tmp_path.iterdir()):
        compress(path, ending)
    packed = corpus.from_folder(tmp_path)
    assert packed == plain
    assert packed.inputs() == plain.inputs()


@pytest.mark.parametrize("ending", [".xz", ".gz"])
def test_a_truncated_file_is_named(tmp_path, ending):
    path = compress(write_folder(tmp_path) / "train.de", ending)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"train\.de\.\w+ is damaged"):
        corpus.from_folder(tmp_path)


def test_misaligned_files_are_refused_with_their_counts(tmp_path):
    write_folder(tmp_path)
    path = tmp_path / "train.en"
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(ValueError, match="train are not aligned: 300 lines in the source and 299 in the target"):
        corpus.from_folder(tmp_path)


def test_a_folder_without_a_corpus_says_what_was_expected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected train\.de and train\.en .*de-en\.tgz"):
        corpus.from_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        corpus.from_folder(tmp_path / "nowhere")


def test_a_missing_side_is_named(tmp_path):
    (write_folder(tmp_path) / "valid.de").unlink()
    with pytest.raises(FileNotFoundError, match=r"valid\.de is missing, although valid\.en is there"):
        corpus.from_folder(tmp_path)


def test_suffixes_give_the_languages(tmp_path):
    write_folder(tmp_path)
    compress(tmp_path / "train.en", ".xz")
    files = (tmp_path / "train.de", tmp_path / "train.en.xz")
    assert corpus.from_files({"train": files, "valid": None}).languages == ("de", "en")
    assert corpus.from_files({"train": files[::-1]}).languages == ("en", "de")
    assert corpus.from_files({"train": files}, ("nds", "sco")).languages == ("nds", "sco")
    named = [path.rename(tmp_path / name) for path, name in zip(files, ("a.text", "b.text.xz"), strict=True)]
    with pytest.raises(ValueError, match=r"languages must be given.*a\.text and b\.text\.xz"):
        corpus.from_files({"train": tuple(named)})


def test_two_languages_must_differ(tmp_path):
    with pytest.raises(ValueError, match="languages must be two different languages, got 'de' twice"):
        corpus.from_folder(write_folder(tmp_path), ("de", "de"))


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


def write_iwslt(folder, pair="de-en"):
    """A small copy of IWSLT14 as distributed, with additional files that must be ignored."""
    folder.mkdir(parents=True)
    for language in pair.split("-"):
        (folder / f"train.tags.{pair}.{language}").write_text(TRAINING.format(language=language))
        for name in (*iwslt.TEST_SETS, "TED.tst2099"):
            made = XML.format(name=name, language=language)
            (folder / f"IWSLT14.{name}.{pair}.{language}.xml").write_text(made)
    (folder / "README").write_text("not text")
    return folder


def forms_of_iwslt(tmp_path):
    """What --source may be."""
    folder = write_iwslt(tmp_path / "out" / "de-en")
    archives = tmp_path / "archives"
    archives.mkdir()
    with tarfile.open(archives / "de-en.tgz", "w:gz") as tar:
        tar.add(folder, "de-en")
    return [folder, folder.parent, archives, archives / "de-en.tgz"]


def test_iwslt14_is_what_fairseqs_script_keeps(tmp_path):
    for place in forms_of_iwslt(tmp_path):
        found = corpus.from_folder(place)
        assert list(found.splits) == ["train", "test"]
        train = found.splits["train"]
        for side, language in ((train.source, "de"), (train.target, "en")):
            assert b"\n".join(side).decode() + "\n" == KEPT.format(language=language)
        order = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
        expected = [line for name in order for line in (f"{name}'s first &amp; best in en", f"  {name} second")]
        assert [line.decode() for line in found.splits["test"].target] == expected


def test_iwslt14_can_be_read_in_the_other_direction(tmp_path):
    folder = write_iwslt(tmp_path / "de-en")
    forth, back = corpus.from_folder(folder), corpus.from_folder(folder, ("en", "de"))
    assert back.splits["test"].source == forth.splits["test"].target


def test_an_incomplete_iwslt14_names_what_is_missing(tmp_path):
    folder = write_iwslt(tmp_path / "de-en")
    (folder / "IWSLT14.TED.tst2011.de-en.en.xml").unlink()
    with pytest.raises(FileNotFoundError, match=r"IWSLT14\.TED\.tst2011\.de-en\.en\.xml is missing"):
        corpus.from_folder(folder)


def test_a_damaged_archive_is_named(tmp_path):
    archive = forms_of_iwslt(tmp_path)[-1]
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(ValueError, match=re.escape(str(archive)) + " is damaged"):
        corpus.from_folder(archive)
    archive.write_text("no archive")
    with pytest.raises(ValueError, match=r"or no archive: file could not be opened.*; expected IWSLT14 as de-en\.tgz"):
        corpus.from_folder(archive)
