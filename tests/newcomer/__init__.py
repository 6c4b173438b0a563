"""First steps after an installation."""
