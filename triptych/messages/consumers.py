"""Messages between frontends and consumers of rows in another engine's process."""

from typing import Annotated

from msgspec import Meta, Struct

from triptych.messages.identity import ModelIdentity
from triptych.messages.rows import RowLayout
from triptych.messages.work import Seconds
from triptych.types import Address, Positive

KEY_BYTES = 32


class RowConsumer(Struct, frozen=True, tag=True):
    """Consumer → frontend: this process asks for rows, as a language instance does. Sent again and
    again: the first registers it, and the others keep it registered. Answered by RowConsumerAccepted or
    RowConsumerRefused."""

    address: Address
    name: str
    engine: str
    """The engine and its version, for people."""
    model: ModelIdentity
    """The model that the engine serves."""
    width: Positive
    """Elements of a row that the engine's decoder takes."""
    dtype: str
    """Type of these elements."""
    join: str = ""
    """How the consumer calls this frontend; it comes back in the answer."""


class RowConsumerAccepted(Struct, frozen=True, tag=True):
    """Frontend → consumer: registered."""

    frontend: Address
    """The frontend's own address, which its tickets name."""
    expiry: Seconds
    """Each side gives the other up after this time without a message of this kind."""
    key: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    """Signs the frontend's tickets."""
    layout: RowLayout | None = None
    """Layout of its encode instances' rows; None before one of them has registered."""
    join: str = ""


class RowConsumerRefused(Struct, frozen=True, tag=True):
    """Frontend → consumer: rows of this service don't fit the engine, for this reason."""

    reason: str
    join: str = ""


def takes_rows(engine: str, rows: str) -> bool:
    """Return whether an engine that computes in a dtype takes rows of a dtype: its own, or float32, in which CPUs have
    them, and which its consumer rounds."""
    return rows in (engine, "float32")


ConsumerMessage = RowConsumer | RowConsumerAccepted | RowConsumerRefused
