"""Image files to RGB images, with Pillow."""

from pathlib import Path
from typing import TYPE_CHECKING

from llqr.lab.extras import extra

if TYPE_CHECKING:
    from PIL.Image import Image


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
        raise ValueError(f"{path} is not a readable image: {error}.") from error
