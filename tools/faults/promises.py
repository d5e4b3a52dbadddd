"""What has been promised about sessions at a moment, and whether a store keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from tests.store.synthetic import Chain, read
from tqstore.errors import NotFound
from tqstore.store.page_store import PageStore


class BrokenPromise(AssertionError):
    """A store that lost or changed what it had acknowledged."""


@dataclass(frozen=True)
class State:
    """A session's state: so many blocks of a chain; None stands for no session.

    `save` tells saves of the same blocks apart, where the checkpoint's metadata has it.
    """

    chain: Chain
    num_blocks: int
    save: int = 0


@dataclass(frozen=True)
class Step:
    """`session` is about to become `state`, or was acknowledged to be.

    `purged` are blocks [first, last) of a chain whose pages must then be gone for good.
    """

    kind: Literal["begun", "acknowledged"]
    session: str
    state: State | None
    purged: tuple[Chain, int, int] | None = None


@dataclass
class Promises:
    """States each session may be in: the one acknowledged last, or one begun since."""

    allowed: dict[str, list[State | None]] = field(default_factory=dict)
    purged: list[tuple[Chain, int, int]] = field(default_factory=list)

    def hear(self, step: Step) -> None:
        states = self.allowed.setdefault(step.session, [None])
        if step.kind == "acknowledged":
            states[:] = [step.state]
            if step.purged is not None:
                self.purged.append(step.purged)
        else:
            states.append(step.state)

    def check(self, store: PageStore) -> None:
        """BrokenPromise unless every session is in an allowed state, to the last bit."""
        for session, states in self.allowed.items():
            check_session(store, session, states)
        for sequence, first, last in self.purged:
            check_gone(store, sequence, first, last)


def check_gone(store: PageStore, sequence: Chain, first: int, last: int) -> None:
    ns = store.namespace(sequence.namespace)
    for spec in sequence.namespace.page_specs:
        for key in sequence.keys(spec, first, last):
            if ns.locate(spec, *key) is not None:
                raise BrokenPromise("a purged page is still there")


def check_session(store: PageStore, session: str, states: Iterable[State | None]) -> None:
    try:
        found = store.latest(session)
    except NotFound:
        if None not in states:
            raise BrokenPromise(f"session {session!r} is lost") from None
        return
    for state in states:
        if state is not None and found == state.chain.checkpoint(state.num_blocks):
            check_pages(store, session, state)
            return
    raise BrokenPromise(f"session {session!r} has {found.num_tokens} tokens, never saved so")


def check_pages(store: PageStore, session: str, state: State) -> None:
    ns = store.namespace(state.chain.namespace)
    for spec in state.chain.namespace.page_specs:
        keys = state.chain.keys(spec, 0, state.num_blocks)
        try:
            pages = read(ns, spec, keys)
        except (NotFound, AssertionError) as error:
            raise BrokenPromise(f"session {session!r} lost a page") from error
        if (pages != state.chain.records(spec, keys)).any():
            raise BrokenPromise(f"session {session!r} has a page of other bytes")
