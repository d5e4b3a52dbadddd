"""Namespace: what must match before a stored page may be used, and its identity.

Owns the fields, their canonical bytes, the id hashed from them, and naming the first field in
which two namespaces differ.  How a model's fingerprint comes about is its caller's affair.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tqstore.errors import Corrupt, Incompatible, InvalidInput
from tqstore.format.format_file import FORMAT_VERSION
from tqstore.format.framing import FRAME_NBYTES, Buffer, read_frame, write_frame
from tqstore.format.plain import Fields, pack_plain, unpack_map
from tqstore.spec import PageSpec

MAGIC = b"TQNS"
MAX_NBYTES = 1 << 22
MAX_LAYERS = 1 << 12
_HEX = re.compile(r"[0-9a-f]{16,128}")


def tenant_digest(salt: bytes | str | None) -> str | None:
    """What is stored of a tenant's salt: its hash, so that the file does not tell the salt."""
    if salt is None:
        return None
    raw = salt.encode() if isinstance(salt, str) else salt
    if not raw:
        raise InvalidInput("a tenant salt must not be empty", remedy="Use None for no tenant")
    return hashlib.sha256(b"tqstore tenant\0" + raw).hexdigest()


@dataclass(frozen=True)
class Namespace:
    """The fingerprint in full.  Two caches share pages only if all of it is equal.

    `fingerprint` is a lowercase hex digest of the model (weights, adapter, config); `parts` are
    readable digests of what went into it, so that a mismatch can say `model.adapter`.  `layers`
    are the page specs of the paged layers in order; all have the same `page_tokens`.
    """

    fingerprint: str
    layers: tuple[PageSpec, ...]
    seed: int = 0
    parts: tuple[tuple[str, str], ...] = ()
    tenant: str | None = None

    @classmethod
    def of(
        cls,
        fingerprint: str,
        layers: tuple[PageSpec, ...] | list[PageSpec],
        *,
        seed: int = 0,
        parts: Mapping[str, str] | None = None,
        tenant_salt: bytes | str | None = None,
    ) -> Namespace:
        """The usual way to make one: from a dict of parts and the tenant's salt itself."""
        return cls(
            fingerprint=fingerprint,
            layers=tuple(layers),
            seed=seed,
            parts=tuple(sorted((parts or {}).items())),
            tenant=tenant_digest(tenant_salt),
        )

    def __post_init__(self) -> None:
        if not isinstance(self.fingerprint, str) or not _HEX.fullmatch(self.fingerprint):
            raise InvalidInput(
                f"a model fingerprint is 16 to 128 lowercase hex digits, not {self.fingerprint!r}"
            )
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InvalidInput(f"a namespace has 1 to {MAX_LAYERS} layers, not {len(self.layers)}")
        if len({layer.page_tokens for layer in self.layers}) != 1:
            raise InvalidInput("all layers of a namespace must have the same page_tokens")
        if not 0 <= self.seed < 1 << 63:
            raise InvalidInput(f"seed must be from 0 to 2^63 - 1, not {self.seed!r}")
        if self.tenant is not None and not _HEX.fullmatch(self.tenant):
            raise InvalidInput(
                "tenant must be a hex digest", remedy="Use Namespace.of(tenant_salt=)"
            )
        if list(self.parts) != sorted(dict(self.parts).items()) or not all(
            isinstance(text, str) for pair in self.parts for text in pair
        ):
            raise InvalidInput("parts must be unique (name, text) pairs sorted by name")

    @property
    def page_tokens(self) -> int:
        return self.layers[0].page_tokens

    @property
    def page_specs(self) -> tuple[PageSpec, ...]:
        """The distinct page specs, in the order of the first layer that uses each."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def fields(self) -> dict[str, Any]:
        """Plain values: the content of namespace.msgpack, in the order mismatches are named."""
        return {
            "format": FORMAT_VERSION,
            "model": {"fingerprint": self.fingerprint, "parts": dict(self.parts)},
            "layers": [layer.fields for layer in self.layers],
            "seed": self.seed,
            "tenant": self.tenant,
        }

    @cached_property
    def id(self) -> bytes:
        """32 bytes: sha256 of the canonical msgpack of `fields`, which is the file's body."""
        return hashlib.sha256(pack_plain(self.fields, "namespace")).digest()

    def encode(self) -> bytes:
        return write_frame(MAGIC, FORMAT_VERSION, pack_plain(self.fields, "namespace"))

    @classmethod
    def decode(cls, data: Buffer, file: str = "namespace.msgpack") -> Namespace:
        """Corrupt for damage or a body that is not canonical, Incompatible for a newer format."""
        body = read_frame(data, MAGIC, FORMAT_VERSION, file=file, max_nbytes=MAX_NBYTES)
        fields = unpack_map(body, file)
        try:
            namespace = cls._from_fields(fields)
        except InvalidInput as error:
            raise Corrupt(file, str(error)) from error
        if namespace.encode()[FRAME_NBYTES:] != body:
            raise Corrupt(file, "the record is not in canonical form")
        return namespace

    @classmethod
    def _from_fields(cls, fields: Fields) -> Namespace:
        fields.take_int("format", 1, FORMAT_VERSION)
        model = Fields(fields.take("model", dict), fields.file, "model")
        layers = [PageSpec.from_fields(_scalars(item)) for item in fields.take("layers", list)]
        namespace = cls(
            fingerprint=model.take("fingerprint", str),
            layers=tuple(layers),
            seed=fields.take_int("seed", 0, (1 << 63) - 1),
            parts=tuple(sorted(model.take("parts", dict).items())),
            tenant=fields.take_optional("tenant", str),
        )
        model.done()
        fields.done()
        return namespace

    def check_same(self, given: Namespace, *, doing: str = "") -> None:
        """Raises Incompatible for the first field in which `self`, the stored one, differs."""
        for name, stored_value, given_value in differences(self.fields, given.fields):
            raise Incompatible(
                name,
                stored_value,
                given_value,
                doing=doing,
                remedy="Use the model and settings it was saved with, or another session name",
            )


def _scalars(item: object) -> dict[str, str | int]:
    """`item` if it maps names to text and integers, as the fields of a page spec do."""
    if isinstance(item, dict) and all(type(value) in (str, int) for value in item.values()):
        return item
    raise InvalidInput("a layer is not a map of text and integers")


def differences(stored: Any, given: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(field path, stored value, given value) of every leaf that differs, in order."""
    if isinstance(stored, dict) and isinstance(given, dict):
        for key in dict.fromkeys([*stored, *given]):
            path = f"{name}.{key}" if name else key
            yield from differences(stored.get(key), given.get(key), path)
    elif isinstance(stored, list) and isinstance(given, list):
        if len(stored) != len(given):
            yield f"number of {name}", len(stored), len(given)
        for i, (a, b) in enumerate(zip(stored, given, strict=False)):
            yield from differences(a, b, f"{name}[{i}]")
    elif stored != given:
        yield name, stored, given
