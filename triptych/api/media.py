"""``/v1/media``: has media encoded ahead of questions, and keeps their files under names that chats can use."""

from typing import Any

from pydantic import Field

from triptych.api.context import ApiContext
from triptych.api.encode import MediaFields, encode
from triptych.api.generation import RequestContext
from triptych.api.media_parts import cache_name, media_parts
from triptych.api.plan import media_item
from triptych.errors import MediaTooLarge

MAX_EXPIRES_AFTER = 30 * 86400


class MediaRequest(MediaFields):
    """The body of ``POST /v1/media``."""

    expires_after: int = Field(3600, ge=1, le=MAX_EXPIRES_AFTER)
    """Seconds for which the files are kept at most."""


async def keep(api: ApiContext, request: MediaRequest, context: RequestContext) -> dict[str, Any]:
    """Return ``objects.KeptMediaList``. Raises what ``encode`` raises, and MediaTooLarge for files that the cache of
    media with a uuid has no room for."""
    encoded = await encode(api, request, context)
    parts = list(media_parts(request.messages).values())
    expires_at = int(api.router.clock.wall()) + request.expires_after
    named = []
    for item, _ in encoded.items:
        uuid = getattr(parts[item.number], "uuid", None) or f"media-{item.key[:32]}"
        named.append((item, uuid, cache_name(item.plan.modality, uuid)))
    for item, _, name in named:
        api.uuid_cache.put(context.scope, name, item.data, expires_at)
    for item, _, name in named:
        if api.uuid_cache.get(context.scope, name) is None:
            raise MediaTooLarge("the file doesn't fit in the cache of media with a uuid", item.param)
    salt = request.cache_salt or ""
    return {
        "object": "list",
        "model": api.model_name,
        "data": [
            media_item("media", item)
            | {"uuid": uuid, "expires_at": expires_at, "cached": api.lifecycle.encodes.has_cached(item, salt)}
            for item, uuid, _ in named
        ],
    }
