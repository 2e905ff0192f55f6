"""Image files to RGB images, with Pillow."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llqr.lab.errors import DataError
from llqr.lab.extras import extra

if TYPE_CHECKING:
    from PIL.Image import Image


class UnreadableImage(DataError, ValueError):
    """An image file that cannot be used. A worker process hands it over with its traceback before the sentence."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence.strip().rpartition("\n")[2].rpartition(f"{type(self).__name__}: ")[2])


def decode(path: Path) -> "Image":
    """The image at ``path`` in RGB, fully read; errors name the file."""
    pillow = extra("PIL.Image", "Reading image files needs Pillow")
    try:
        with pillow.open(path) as image:
            # Pillow reads 16 bits per pixel of PNG and PPM into 32, and would cut off what is above 255.
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
                image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise UnreadableImage(f"{path} has 32 bits per pixel, whose scale is not known: save it with 8 or 16.")
            found: Image = image.convert("RGB")
            return found
    except (FileNotFoundError, UnreadableImage):
        raise
    # Pillow reports damage as OSError, SyntaxError or ValueError, depending on the format.
    except (OSError, SyntaxError, ValueError) as error:
        raise UnreadableImage(f"{path} is not a readable image: {error}.") from error
