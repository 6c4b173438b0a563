"""Runs the tests that vLLM publishes of its API against Triptych: ``scripts/suites``."""
