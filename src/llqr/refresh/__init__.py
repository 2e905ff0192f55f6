"""A refresh: the inner loop, at once, captured or spread over steps, and what is checked before its result is used."""
