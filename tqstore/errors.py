"""Every error tqstore raises on purpose, and nothing else.

One class for each thing a caller can do about it (docs/api.md).  Each also derives from the
builtin a Python programmer would expect to catch, and says what was being done, what was wrong
and what to do next.  `assert` is left for our own bugs.
"""

from __future__ import annotations

from typing import ClassVar


class TqStoreError(Exception):
    """Base of all.  `exit_code` is what the command line returns for it."""

    exit_code: ClassVar[int] = 10

    def __init__(self, problem: str, *, doing: str = "", remedy: str = "") -> None:
        self.problem = problem
        self.doing = doing
        self.remedy = remedy
        text = f"{doing}: {problem}" if doing else problem
        super().__init__(f"{text}. {remedy}" if remedy else text)

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class NotFound(TqStoreError, KeyError):
    """A session, pack, page or store that is not there."""

    exit_code = 11


class AlreadyExists(TqStoreError):
    """A name that is taken and would have to be overwritten."""

    exit_code = 12


class InvalidInput(TqStoreError, ValueError):
    """A value the caller passed is wrong; nothing was changed."""

    exit_code = 13


class Incompatible(TqStoreError):
    """Stored state belongs to something else: `field` differs, `stored` against `given`."""

    exit_code = 14

    def __init__(
        self, field: str, stored: object, given: object, *, doing: str = "", remedy: str = ""
    ) -> None:
        self.field = field
        self.stored = stored
        self.given = given
        super().__init__(
            f"{field} differs: stored {stored!r}, given {given!r}", doing=doing, remedy=remedy
        )


class Corrupt(TqStoreError):
    """Stored bytes are not what was written: which `file`, which `page` of it, and what."""

    exit_code = 15

    def __init__(
        self, file: str, what: str, *, page: int | None = None, doing: str = "", remedy: str = ""
    ) -> None:
        self.file = file
        self.page = page
        self.what = what
        where = file if page is None else f"{file} page {page}"
        super().__init__(f"{where}: {what}", doing=doing, remedy=remedy)


class Conflict(TqStoreError):
    """Another process or thread holds or changed what was asked for."""

    exit_code = 16


class PoolExhausted(TqStoreError, MemoryError):
    """The memory budget holds only pinned pages."""

    exit_code = 17


class StoreFull(TqStoreError, OSError):
    """The disk or the store's own budget has no room; nothing was published."""

    exit_code = 18


class BackendFailed(TqStoreError, OSError):
    """The file system refused or failed an operation for a reason of its own."""

    exit_code = 19
