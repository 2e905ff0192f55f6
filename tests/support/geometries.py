"""Geometries for tests, whose settings are given side by side."""

from dataclasses import fields

import llqr

INNER = {field.name for field in fields(llqr.Inner)}
RUNTIME = {field.name for field in fields(llqr.Runtime)}


def flat_geometry(model, loss_fn, **settings):
    """`llqr.Geometry` with the fields of `Inner` and `Runtime` among its own arguments."""
    settings.setdefault("structure", "diagonal")  # cheap; tests that care about the structure name it
    inner = {key: settings.pop(key) for key in INNER & settings.keys()}
    runtime = {key: settings.pop(key) for key in RUNTIME & settings.keys()}
    return llqr.Geometry(model, loss_fn, inner=llqr.Inner(**inner), runtime=llqr.Runtime(**runtime), **settings)
