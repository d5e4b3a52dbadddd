"""The FORMAT file: what a folder must say before anything else in it is believed."""

from __future__ import annotations

from dataclasses import dataclass

from tqstore.errors import Corrupt, Incompatible
from tqstore.format.framing import NEWER_REMEDY, Buffer, read_frame, write_frame
from tqstore.format.plain import pack_plain, unpack_map

FORMAT_VERSION = 1
MAGIC = b"TQST"
MAX_NBYTES = 1 << 16
ENCRYPTION = "aes-256-gcm"
KNOWN_FEATURES = frozenset({ENCRYPTION})
KEY_CHECK_NBYTES = 16


@dataclass(frozen=True)
class FormatFile:
    """`required_features` must all be known to a reader; `uuid` tells one store from another.

    `key_check`, of an encrypted store alone, tells whether a key is the right one.
    """

    uuid: bytes
    created_ns: int
    required_features: tuple[str, ...] = ()
    key_check: bytes | None = None

    @property
    def is_encrypted(self) -> bool:
        return ENCRYPTION in self.required_features

    def encode(self) -> bytes:
        body = {
            "format": FORMAT_VERSION,
            "uuid": self.uuid,
            "created_ns": self.created_ns,
            "required_features": self.required_features,
        }
        if self.key_check is not None:
            body["key_check"] = self.key_check
        return write_frame(MAGIC, FORMAT_VERSION, pack_plain(body, "FORMAT"))

    @classmethod
    def decode(cls, data: Buffer, file: str = "FORMAT") -> FormatFile:
        """Corrupt for damage, Incompatible for a newer format or a feature unknown here."""
        body = read_frame(data, MAGIC, FORMAT_VERSION, file=file, max_nbytes=MAX_NBYTES)
        fields = unpack_map(body, file)
        fields.take_int("format", 1, FORMAT_VERSION)
        features = fields.take("required_features", list)
        for feature in features:
            if not isinstance(feature, str):
                raise Corrupt(file, "a required feature is not text")
            if feature not in KNOWN_FEATURES:
                raise Incompatible(
                    "required_features", feature, sorted(KNOWN_FEATURES), remedy=NEWER_REMEDY
                )
        record = cls(
            uuid=fields.take_bytes("uuid", 16),
            created_ns=fields.take_int("created_ns", 0, (1 << 63) - 1),
            required_features=tuple(features),
            key_check=(
                fields.take_bytes("key_check", KEY_CHECK_NBYTES) if ENCRYPTION in features else None
            ),
        )
        fields.done()
        return record
