"""Sandboxed processes for untrusted input: limited in memory and time, killable, and trusted with nothing."""
