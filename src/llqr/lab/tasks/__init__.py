"""Tasks by name: what is learned, how its loss is computed and how the result is measured."""

from llqr.lab.tasks.task import Batch, Task

__all__ = ["TASKS", "Batch", "Task"]

TASKS: dict[str, str | type[Task]] = {
    "classification": "llqr.lab.tasks.classification:ClassificationTask",
    "translation": "llqr.lab.tasks.translation:TranslationTask",
    "own": "llqr.lab.own.task:OwnTask",
}
"""The tasks by name: classes, or where to import them from when they are needed. A new task is one more line."""
