"""Runs other people's clients against a service: ``scripts/compat``."""
