"""Tasks by name: what is learned, how its loss is computed and what is measured of it."""

import torch

from llqr.lab.config.recipe import Recipe
from llqr.lab.tasks.classification import ClassificationTask
from llqr.lab.tasks.language import LanguageTask
from llqr.lab.tasks.task import Batch, Task
from llqr.lab.tasks.translation import TranslationTask

__all__ = ["Batch", "Task", "load"]

TASKS: dict[str, type[Task]] = {
    "classification": ClassificationTask,
    "translation": TranslationTask,
    "language": LanguageTask,
}


def load(recipe: Recipe, device: torch.device) -> Task:
    """The task of a recipe with its data read; a `DataError` if that is missing or damaged."""
    return TASKS[recipe.task.name].load(recipe, device)
