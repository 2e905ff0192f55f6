"""The files whose change makes another experiment: those beside it that it imports, and no installed ones."""

from llqr.lab.tasks.own.fingerprint import files_of


def test_imports_are_followed_wherever_they_stand(tmp_path):
    files = {
        "mine.py": "import torch, parts\nfrom tools.shapes import width\ndef f():\n    import late\n",
        "parts.py": "import mine\n",
        "late.py": "",
        "other.py": "",
        "tools/__init__.py": "from . import colours",
        "tools/shapes.py": "from .deep.bottom import x\nfrom .. import beside",
        "tools/colours.py": "",
        "tools/deep/__init__.py": "",
        "tools/deep/bottom.py": "x = 1",
        "tools/unused.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)

    def names(*arguments):
        return {str(path.relative_to(tmp_path.resolve())) for path in files_of(*arguments)}

    assert names(tmp_path / "mine.py", tmp_path) == set(files) - {"other.py", "tools/unused.py"}
    inside = {"tools/shapes.py", "tools/deep/__init__.py", "tools/deep/bottom.py"}
    assert names(tmp_path / "tools/shapes.py", tmp_path, "tools") == inside
    (tmp_path / "tools/shapes.py").write_text("import parts, tools.colours")
    assert names(tmp_path / "tools/shapes.py", tmp_path, "tools") == {
        "tools/shapes.py",
        "tools/__init__.py",
        "tools/colours.py",
    }
