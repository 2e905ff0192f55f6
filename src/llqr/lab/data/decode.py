"""Image files to RGB images, with Pillow."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def decode(path: Path) -> "Image":
    """The image at ``path`` in RGB, fully read; errors name the file."""
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
    # Pillow reports damage as OSError, SyntaxError or ValueError, depending on the format.
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is not a readable image: {error}.") from error
