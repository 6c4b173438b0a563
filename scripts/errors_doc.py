"""Writes the tables of errors in docs/troubleshooting.md from ``triptych/errors.py`` and ``triptych/api/errors.py``. A
test fails when the page is out of date.

.venv/bin/python -m scripts.errors_doc
"""

import inspect

from scripts.generated import DOCS, table, with_region
from triptych import errors
from triptych.api.errors import body_of, headers_of, status_of
from triptych.errors import MediaError, RequestError, ServiceError, StartError, TriptychError

PAGE = DOCS / "troubleshooting.md"


def page() -> str:
    """The page with its tables as the code has them."""
    answers = [_answer(kind) for kind in kinds(RequestError, ServiceError)]
    start_errors: list[type[TriptychError]] = [StartError, *kinds(StartError)]
    starts = [[f"`{kind.__name__}`", *_said(kind)] for kind in start_errors]
    text = with_region(
        PAGE.read_text(), "errors", table(["code", "status", "meaning", "what to do"], sorted(answers, key=_by_status))
    )
    return with_region(text, "start errors", table(["error", "meaning", "what to do"], starts))


def kinds(*bases: type[TriptychError]) -> list[type[TriptychError]]:
    """The classes of the tree below ``bases``, in the order of the file, without those that only group others."""
    found = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, bases)]
    return [kind for kind in found if kind not in bases and kind is not MediaError]


def _answer(kind: type[TriptychError]) -> list[str]:
    error = kind("")
    status = f"{status_of(error).value}" + (" + Retry-After" if "Retry-After" in headers_of(error) else "")
    return [f"`{body_of(error)['error']['code']}`", status, *_said(kind)]


def _said(kind: type[TriptychError]) -> list[str]:
    """What a class's docstring says: its first paragraph, then the second, which is what to do."""
    paragraphs = [part.replace("``", "`") for part in inspect.cleandoc(kind.__doc__ or "").split("\n\n")]
    return [paragraphs[0], paragraphs[1] if len(paragraphs) > 1 else ""]


def _by_status(row: list[str]) -> tuple[str, str]:
    return row[1], row[0]


if __name__ == "__main__":
    PAGE.write_text(page())
