"""What makes two models the same."""

from blake3 import blake3
from msgspec import Struct

_SHOWN = 12
"""Characters of a digest in messages for people."""


class ModelIdentity(Struct, frozen=True):
    """A model, by its content: equal wherever the same checkpoint is served, whatever its path. Digests are hexadecimal
    and have 256 bits."""

    weights: str = ""
    """Digest of the weight files."""
    config: str = ""
    """Digest of the configuration of model and processors."""
    adapter: str = ""
    """Name of the family's adapter, which computes with the weights."""
    tokenizer: str = ""
    """Digest of the tokenizer, by which instances compile grammars. No row depends on it."""

    @property
    def digest(self) -> str:
        """Digest of what a row depends on: all but the tokenizer."""
        digest = blake3()
        for field in (self.weights, self.config, self.adapter):
            update_with_length(digest, field.encode())
        return digest.hexdigest()

    def difference(self, other: "ModelIdentity") -> str:
        """Return which parts differ, as text for error messages; empty if none does."""
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in self.__struct_fields__]
        return ", ".join(
            f"{name} {mine[:_SHOWN]} here, {theirs[:_SHOWN]} there" for name, mine, theirs in pairs if mine != theirs
        )


def update_with_length(digest: blake3, field: bytes) -> None:
    """Hash a field after its length (eight bytes, little-endian), so that no two lists of fields hash alike."""
    digest.update(len(field).to_bytes(8, "little"))
    digest.update(field)


def kept_name(key: str, salt: str, part: int) -> bytes:
    """Return the name, of 16 bytes, by which frontends and encode instances speak of the rows of an item's part: by the
    item's key, the ``cache_salt`` and the part's number."""
    digest = blake3()
    for field in (key, salt, str(part)):
        update_with_length(digest, field.encode())
    return digest.digest(16)
