"""Faults under load: ends, stops and drains the processes of a service while it answers, and compares the answers."""
