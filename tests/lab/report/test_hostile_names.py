"""Names from files are shown as text: they run nothing, link to nothing but the runs, and break no plot."""

import json
import re
from urllib.parse import unquote, urlsplit

import pytest

from fake_runs import write_analysis, write_run
from llqr.lab import report
from llqr.lab.runs import stored

NAMES = [
    "javascript:alert(1)//x",
    "data:text_html,<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a b%20c#d?e&f",
    r"$\frac$ and $x$",
    "one dollar $",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_text_in_links_tables_and_plots(tmp_path, name):
    folder = tmp_path / name.replace("/", "_")
    original = write_run(tmp_path / "made", "sgdm", 0, config={"recipe": name}, result={"recipe": name, "metric": name})
    original.rename(folder)
    config = json.loads((folder / "config.json").read_text())
    config["run"]["method"] = name
    (folder / "config.json").write_text(json.dumps(config))
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    result = json.loads((folder / "result.json").read_text())
    for table in (*records, result):
        table["test"][name] = table["test"].pop("accuracy")
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (folder / "result.json").write_text(json.dumps(result | {"method": name, "title": name}))
    write_analysis(folder, 2.0, 1.0)
    page = report.render([stored.read(folder)], tmp_path)
    assert "<img" not in page
    assert "<script>alert" not in page
    links = re.findall(r'href="([^"]*)"', page)
    for link in links:
        parts = urlsplit(link)
        assert (parts.scheme, parts.netloc) == ("", "") or link == "data:,"
        if not link.startswith("#") and link != "data:,":
            assert (tmp_path / unquote(parts.path)).exists(), link
            assert not parts.query
    assert len(links) > 5
