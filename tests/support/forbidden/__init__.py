"""Modules that no process of a service may import: a folder for the search path of processes."""
