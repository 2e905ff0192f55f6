"""The laboratory: data, models and commands that run the library's methods on real problems."""
