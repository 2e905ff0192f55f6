"""Names that users write: suggestions for those that do not exist, and which of them may become folders."""

from collections.abc import Iterable
from difflib import get_close_matches

from llqr.lab.errors import ConfigurationError


def check_known(what: str, value: object, known: Iterable[str]) -> None:
    """Refuse a ``value`` that is none of the ``known`` names; ``what`` is the option or the key it was given to."""
    known = list(known)
    if value not in known:
        raise ConfigurationError(unknown(what, value, known))


def unknown(what: str, value: object, known: Iterable[str], otherwise: str = "") -> str:
    """The sentence about such a value: which names there are, which one was meant, and what it may be ``otherwise``."""
    known = list(known)
    return f"{what} must be one of {', '.join(known) or '(none)'}{otherwise}, got {value!r}{suggestion(value, known)}"


def suggestion(value: object, known: Iterable[str], prefix: str = "") -> str:
    """The end of such a sentence; ``prefix`` is written before a name, and not compared."""
    close = get_close_matches(str(value), list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else "."


def check_folder_name(what: str, name: str) -> None:
    """Refuse a name that would lead out of the folder in which it is to name one."""
    if name in ("", ".", "..") or not name.isprintable() or {"/", "\\"} & set(name):
        raise ConfigurationError(
            f"{what} names a folder: it may not be empty, '.' or '..', nor have slashes or control characters, "
            f"got {name!r}."
        )
