"""Where an experiment comes from: a Python file, a function of a module, or an object of the running program.

A source is a text, so that it can be written into a run's configuration and found again by a later command.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from llqr.lab.errors import ConfigurationError, DataError
from llqr.lab.tasks.own import fingerprint
from llqr.lab.tasks.own.batches import fingerprint_of, understood
from llqr.lab.tasks.own.experiment import Experiment
from llqr.lab.tasks.own.random_states import RandomStates

FUNCTION = "experiment"
"""The function that is called if none is named."""
HERE = "object:"
"""What the sources of objects of the running program begin with."""

_objects: dict[str, tuple[Experiment, str]] = {}
_functions: dict[str, Function] = {}
_given: dict[Function, str] = {}
_latest: dict[tuple[str, int], Experiment] = {}  # at most one: its data may be large


@dataclass(frozen=True)
class Function:
    """A user's function, and where it came from: ``text`` is that of its file when it was imported."""

    source: str
    text: bytes
    call: Callable[..., Any]
    file: Path

    @property
    def place(self) -> str:
        """As it is called in messages."""
        return self.source.rpartition(":")[0].rpartition("/")[2]

    @property
    def digest(self) -> str:
        """Of its file, and of those that it imports: beside it, or of the same package."""
        module = self.source.rpartition(":")[0]
        if module.endswith(".py"):
            return fingerprint.of_files(fingerprint.files_of(self.file, self.file.parent))
        above = module.count(".") + (self.file.name == "__init__.py")
        return fingerprint.of_files(fingerprint.files_of(self.file, self.file.parents[above], module.partition(".")[0]))


def is_named_by(name: str) -> bool:
    """Whether a name on the command line is that of a Python file, or of a function of a module."""
    file, colon, function = name.rpartition(":")
    if name.endswith(".py") or (colon and file.endswith(".py")):
        return True
    return bool(colon) and all(part.isidentifier() for part in [*file.split("."), function])


def source(name: str) -> str:
    """The source that a command line names: ``file.py``, ``file.py:function`` or ``package.module:function``."""
    file, function = (name, FUNCTION) if name.endswith(".py") else (name.rpartition(":")[0], name.rpartition(":")[2])
    return f"{Path(file).resolve()}:{function}" if file.endswith(".py") else f"{file}:{function}"


def label(name: str) -> str:
    """How the runs of a source are filed: by the name of its file or module, and of the function if it was named."""
    file, colon, function = name.rpartition(":") if not name.endswith(".py") else (name, "", "")
    stem = Path(file).stem if file.endswith(".py") else file.rpartition(".")[2]
    return f"{stem}-{function}" if colon and function != FUNCTION else stem


def hold(name: str, experiment: Experiment, digest: str) -> str:
    """The source of an object of this program, which is held for as long as the program runs."""
    _latest.clear()
    _objects[f"{name}#{digest}"] = experiment, digest
    return f"{HERE}{name}#{digest}"


def experiment(source: str, seed: int, digest: str | None = None) -> Experiment:
    """What the user gives for a seed; with ``digest``, only if its code and data have not changed since."""
    if digest is not None and digest != digest_of(source):
        raise DataError(f"{_place(source)} has changed since the run was made, or its data have.")
    if (source, seed) not in _latest:
        made = _held(source)[0] if source.startswith(HERE) else _made(_function(source), seed)
        _latest.clear()
        _latest[source, seed] = made
    return _latest[source, seed]


def forget() -> None:
    """Ask functions again for their experiments: a program may change the data between two comparisons."""
    _latest.clear()
    _given.clear()


def digest_of(source: str) -> str:
    """Changes with the code of the experiment, and with the data and the network that it gives for seed 0."""
    if source.startswith(HERE):
        return _held(source)[1]
    function = _function(source)
    if function not in _given:
        made = experiment(source, 0)
        digests = (data_digest, network_digest)
        _given[function] = _explained(function.place, lambda: fingerprint.of_texts(each(made) for each in digests))
    return fingerprint.of_texts([function.digest, _given[function]])


def data_digest(experiment: Experiment) -> str:
    """Changes with the data of an experiment."""
    given = {"train": experiment.train, "test": experiment.test, "valid": experiment.valid}
    found = [understood(name, data, 0) for name, data in given.items() if name != "valid" or data is not None]
    return fingerprint.of_texts(map(fingerprint_of, found))


def network_digest(experiment: Experiment, *, weights: bool = False) -> str:
    """Changes with the shape of the network; with its weights, too, unless they may be drawn anew."""
    with RandomStates(0).inside():
        return fingerprint.of_model(experiment.new_model(), weights=weights)


def _held(source: str) -> tuple[Experiment, str]:
    name = source.removeprefix(HERE)
    if name not in _objects:
        raise DataError(f"{_place(source)} was given to llqr.lab.compare as an object, which only that program has.")
    return _objects[name]


def _place(source: str) -> str:
    return source.removeprefix(HERE).rpartition("#")[0] if source.startswith(HERE) else _function(source).place


# -- importing -----------------------------------------------------------------------------------------------------


def _function(source: str) -> Function:
    """The function of a source, imported again only if its file has changed."""
    file, _, name = source.rpartition(":")
    path = Path(file) if file.endswith(".py") else None
    if path is not None and not path.is_file():
        raise DataError(f"{file} is not there.")
    text = path.read_bytes() if path is not None else b""
    known = _functions.get(source)
    if known is not None and known.text == text:
        return known
    place = path.name if path is not None else file
    with RandomStates(0).inside():  # so that a module may draw its data
        module = _explained(place, lambda: _import_file(path, text) if path is not None else _import_module(file))
    found = getattr(module, name, None)
    if not callable(found):
        functions = inspect.getmembers(module, inspect.isfunction)
        others = [key for key, value in functions if value.__module__ == module.__name__]
        hint = f"; it has {', '.join(others)}: write {place}:{others[0]}" if others else ""
        raise ConfigurationError(f"{place} has no function {name}{hint}.")
    _functions[source] = Function(source, text, found, Path(module.__file__ or ""))
    return _functions[source]


def _import_file(path: Path, text: bytes) -> ModuleType:
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python file.py` does; it stays, for imports inside of functions
    known = sys.modules.get(path.stem)
    free = known is None or getattr(known, "__file__", None) == str(path)
    name = path.stem if free and path.stem.isidentifier() else f"own_{abs(hash(path))}"
    spec = importlib.util.spec_from_loader(name, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # worker processes look for the classes of samples here
    try:
        exec(compile(text, str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # something that the module itself imports
        raise ConfigurationError(f"There is no module {error.name}, looked for from {Path.cwd()}.") from error


def _made(function: Function, seed: int) -> Experiment:
    place = f"{function.call.__name__}() in {function.place}"
    parameters = inspect.signature(function.call).parameters
    needed = [name for name, one in parameters.items() if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
    if needed not in ([], ["seed"]):
        raise ConfigurationError(f"{place} must take nothing, or seed, got the arguments {', '.join(needed)}.")

    def call() -> Any:
        with RandomStates(seed).inside():
            torch.manual_seed(seed)  # also on devices
            return function.call(seed) if needed or "seed" in parameters else function.call()

    made = _explained(function.place, call)
    if not isinstance(made, Experiment):
        raise ConfigurationError(f"{place} must return an llqr.lab.Experiment, got {type(made).__name__}.")
    return made


def _explained(place: str, action: Callable[[], Any]) -> Any:
    """What ``action`` returns; an error in user code becomes a sentence with its line."""
    try:
        return action()
    except SyntaxError as error:
        code = f": {error.text.strip()}" if error.text else ""
        file = Path(error.filename or place).name
        raise ConfigurationError(f"{file}, line {error.lineno}: {error.msg}{code}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not frame.filename.startswith(("<", str(fingerprint.LIBRARY)))]
        theirs = [one for one in theirs if "site-packages" not in one.filename and "importlib" not in one.filename]
        own = [frame for frame in frames if Path(frame.filename).name == place] or theirs
        if isinstance(error, ConfigurationError) and not own:
            raise
        where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else place
        reason = str(error).strip().partition("\n")[0]
        kind = "" if isinstance(error, ConfigurationError | DataError) else f"{type(error).__name__}: "
        raise ConfigurationError(f"{where}: {kind}{reason}") from error
