"""Runs the tests that peers publish of their APIs against Triptych: ``scripts/suites``."""
