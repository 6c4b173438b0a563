"""Forms of content parts that are usual elsewhere: each becomes the form that the schemas of an API have.

Parts of responses are taken in chats, as in vLLM, and the reverse; and those of Transformers' templates."""

from typing import Any


def chat_part(part: Any) -> Any:
    """Return a part in the form of chats; one that isn't known as it is."""
    made = part
    match part:
        case str():
            made = {"type": "text", "text": part}
        case {"type": "input_text" | "output_text"}:
            made = {**part, "type": "text"}
        case (
            {"type": "input_image", "image_url": url, **rest}
            | {"type": "image", "image": str(url), **rest}
            | {"type": "image", "url": str(url), **rest}
        ):
            made = chat_part({**rest, "type": "image_url", "image_url": url})
        case {"type": "video", "video": str(url), **rest} | {"type": "video", "url": str(url), **rest}:
            made = {**rest, "type": "video_url", "video_url": {"url": url}}
        case {"type": "audio", "audio": str(url), **rest} | {"type": "audio", "url": str(url), **rest}:
            made = {**rest, "type": "audio_url", "audio_url": {"url": url}}
        case {"type": "image_url" | "video_url" | "audio_url" as kind} if isinstance(part.get(kind), str):
            made = {**part, kind: {"url": part[kind]}}
    return made


def response_part(part: Any) -> Any:
    """Return a part in the form of responses; one that isn't known as it is."""
    match part:
        case str():
            return {"type": "input_text", "text": part}
        case {"type": "text"}:
            return {**part, "type": "input_text"}
        case {"type": "image_url", "image_url": {"url": url, **details}, **rest}:
            return {**rest, **details, "type": "input_image", "image_url": url}
        case {"type": "image_url", "image_url": str()}:
            return {**part, "type": "input_image"}
    return part
