"""Tasks by name: what is learned, how its loss is computed and how the result is measured."""

from llqr.lab.tasks.classification import ClassificationTask
from llqr.lab.tasks.language import LanguageTask
from llqr.lab.tasks.own.image_folder import ImageFolderTask
from llqr.lab.tasks.own.task import OwnTask
from llqr.lab.tasks.task import Batch, Task
from llqr.lab.tasks.translation import TranslationTask

__all__ = ["TASKS", "Batch", "Task"]

#: The tasks by name. A new one is one more class in this table.
TASKS: dict[str, type[Task]] = {
    "classification": ClassificationTask,
    "translation": TranslationTask,
    "language": LanguageTask,
    "own": OwnTask,
    "image-folder": ImageFolderTask,
}
