from __future__ import annotations

import numpy as np

from tqstore.paging.page_table import COLD, EXPIRED, PageTable


def refs(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_entries_come_back_in_order_and_take_eight_bytes() -> None:
    table = PageTable(refs(5, COLD, EXPIRED, 1 << 40))
    assert table.refs().tolist() == [5, COLD, EXPIRED, 1 << 40]
    assert table.refs(1, 3).tolist() == [COLD, EXPIRED]
    assert len(table) == 4
    assert table.nbytes == 32


def test_put_replaces_only_the_blocks_named() -> None:
    table = PageTable(refs(1, 2, 3, 4))
    table.put(np.array([3, 0]), refs(COLD, 9))
    assert table.refs().tolist() == [9, 2, 3, COLD]


def test_truncate_returns_what_it_drops() -> None:
    table = PageTable(refs(1, 2, 3, 4))
    assert table.truncate(1).tolist() == [2, 3, 4]
    assert table.refs().tolist() == [1]


def test_a_copy_is_independent() -> None:
    table = PageTable(refs(1, 2))
    twin = table.copy()
    twin.extend(refs(3))
    twin.put(np.array([0]), refs(7))
    assert table.refs().tolist() == [1, 2]
    assert twin.refs().tolist() == [7, 2, 3]
