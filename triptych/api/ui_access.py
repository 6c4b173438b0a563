"""Who may see the data of ``/ui``, and the headers of its answers."""

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triptych.api.ui_files import PAGE
from triptych.api.web_pages import is_for_another_page, names_this_machine
from triptych.config import is_loopback

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; media-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer under ``/ui``."""
FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
"""Headers by which a proxy shows that the request isn't from this machine."""
REFUSAL = """\
Without API keys, only this machine can see the pipeline.
Open it there as http://127.0.0.1:PORT/ui (from elsewhere: ssh -L PORT:127.0.0.1:PORT HOST),
or start the service with --api-key-file FILE, and give the page one of the file's keys.
"""


def is_local(request: Request) -> bool:
    """Return whether a request comes from this machine, and from a page of this service if from any."""
    headers, client = request.headers, request.client
    if client is None or not is_loopback(client.host) or any(name in headers for name in FORWARDED):
        return False
    return names_this_machine(headers.get("host", "")) and not is_for_another_page(headers)


def refusal(request: Request) -> Response | None:
    """Return the answer to a request that may not see the service; None if it may: it has a valid key, or is local."""
    if hasattr(request.state, "api_key") or is_local(request):
        return None
    return PlainTextResponse(REFUSAL, 403, {"Cache-Control": "no-store"})


class UiHeaders:
    """ASGI middleware. Adds ``HEADERS`` to every answer under ``/ui``, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        under = scope["type"] == "http" and (scope["path"] == PAGE or scope["path"].startswith(f"{PAGE}/"))
        await self._app(scope, receive, send_with_headers if under else send)
