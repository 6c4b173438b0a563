"""Answers as JSON by msgspec, several times as fast as Python's own: nobody else's tokens go out meanwhile."""

from typing import Any

import msgspec
from starlette.responses import Response


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)
