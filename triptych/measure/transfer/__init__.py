"""Measurements of ``triptych bench``. Part of the package, so that the command works in every installation."""
