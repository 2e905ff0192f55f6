"""Image files to RGB images, with Pillow."""

from pathlib import Path
from typing import TYPE_CHECKING

from llqr.lab.errors import DataError
from llqr.lab.extras import extra

if TYPE_CHECKING:
    from PIL.Image import Image


class UnreadableImage(DataError, ValueError):
    """An image file that is damaged. A worker process hands it over with its traceback before the sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence.strip().rpartition("\n")[2].rpartition(f"{type(self).__name__}: ")[2])


def decode(path: Path) -> "Image":
    """The image at ``path`` in RGB, fully read; errors name the file."""
    pillow = extra("PIL.Image", "Reading image files needs Pillow")
    try:
        with pillow.open(path) as image:
            found: Image = image.convert("RGB")
            return found
    except FileNotFoundError:
        raise
    # Pillow reports damage as OSError, SyntaxError or ValueError, depending on the format.
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadableImage(f"{path} is not a readable image: {error}.") from error
