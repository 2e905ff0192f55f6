"""The 1797 handwritten digits of 8 x 8 pixels that come with scikit-learn: no download, no files."""

import numpy as np

from llqr.lab.data.imageset import ImageSet, image_set
from llqr.lab.extras import extra

TEST_FRACTION = 0.2


def read_digits() -> tuple[ImageSet, ImageSet]:
    """A fixed, stratified split into training and test digits; pixels keep their scale of 0 to 16."""
    datasets, selection = (
        extra(f"sklearn.{part}", "The digits come with scikit-learn") for part in ("datasets", "model_selection")
    )
    bunch = datasets.load_digits()
    images = bunch.images.astype(np.uint8)[..., None]
    train_x, test_x, train_y, test_y = selection.train_test_split(
        images, bunch.target, test_size=TEST_FRACTION, random_state=0, stratify=bunch.target
    )
    return image_set(train_x, train_y, 10, "digits"), image_set(test_x, test_y, 10, "digits")
