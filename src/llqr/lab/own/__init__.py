"""One's own experiment: a model, a loss and data of the user, made into a task and a recipe of the laboratory."""
