"""A refresh: the inner loop, at once, captured or spread over steps, and what is checked before its result is used.

In reading order: `inner_loop` (the eager loop) and `captured` (the same as CUDA graphs); `progress` (a refresh
under way); `refresher`, which runs all of them; `effect` and `guards` (what is checked at the end); `report`.
"""
