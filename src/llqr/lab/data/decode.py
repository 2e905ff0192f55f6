"""Image files to RGB images, with Pillow."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def decode(path: Path) -> "Image":
    """The image at ``path`` in RGB, fully read; says which file is missing or damaged."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ModuleNotFoundError(
            "Reading image files needs Pillow; install it with: pip install 'llqr[lab]'."
        ) from error
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise
    # Pillow reports damage as OSError, SyntaxError or ValueError, by format.
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not a readable image: {error}.") from error
