"""The page at ``/ui``: files that the frontend serves as they are."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Where the files are; those with suffixes of a web page are served, and no others."""
