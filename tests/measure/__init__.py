"""Tests of ``triptych bench split``."""
