"""Measures one process beside encode, prefill and decode as processes of their own, and beside replicas."""
