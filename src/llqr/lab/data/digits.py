"""The 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn: no download, no files."""

import numpy as np

from llqr.lab.data.imageset import ImageSet, image_set

TEST_FRACTION = 0.2


def read_digits() -> tuple[ImageSet, ImageSet]:
    """A fixed, stratified split into training and test digits; pixels keep their scale of 0 to 16."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ModuleNotFoundError(
            "The digits come with scikit-learn; install it with: pip install 'llqr[lab]'."
        ) from error
    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[..., None]
    train_x, test_x, train_y, test_y = train_test_split(
        images, bunch.target, test_size=TEST_FRACTION, random_state=0, stratify=bunch.target
    )
    return image_set(train_x, train_y, 10, "digits"), image_set(test_x, test_y, 10, "digits")
