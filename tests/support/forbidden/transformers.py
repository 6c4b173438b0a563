"""In place of the package, for processes that must not import it."""

raise SystemExit("transformers was imported")
