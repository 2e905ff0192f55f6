"""A model, a loss and data of the user as a task."""
