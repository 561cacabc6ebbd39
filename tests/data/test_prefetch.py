"""Reading ahead: the same results in the same order, errors where they belong, and no thread left."""

import threading
from contextlib import closing

import pytest

from mlxlm.data.batches import prefetch
from mlxlm.utils.errors import DataError


def reading_threads():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


@pytest.mark.parametrize("prefetch_factor", [1, 2, 5])
def test_results_come_in_order(prefetch_factor):
    assert list(prefetch(lambda n: n * n, range(3, 40), prefetch_factor)) == [n * n for n in range(3, 40)]
    assert list(prefetch(lambda n: n, [], prefetch_factor)) == []
    assert not reading_threads()


def test_the_next_is_read_while_this_one_is_used():
    """Two ahead, and no more; all in one thread."""
    read, threads, third = [], set(), threading.Event()

    def reads(n):
        read.append(n)
        threads.add(threading.current_thread())
        if n == 2:
            third.set()
        return n

    with closing(prefetch(reads, range(10))) as results:
        assert next(results) == 0
        assert third.wait(10)
        assert next(results) == 1
        assert len(read) <= 4
        assert len(threads) == 1 and threading.current_thread() not in threads
    assert not reading_threads()


def test_an_error_comes_where_its_result_would():
    def reads(n):
        if n == 3:
            raise DataError(f"no {n}")
        return n

    results = prefetch(reads, range(10))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="no 3"):
        next(results)
    assert not reading_threads()
    assert list(results) == []


def test_closing_waits_for_the_read_in_work_and_starts_no_other():
    read, begun, go_on = [], threading.Event(), threading.Event()

    def reads(n):
        read.append(n)
        if n == 1:
            begun.set()
            go_on.wait(10)
        return n

    results = prefetch(reads, range(10), prefetch_factor=3)
    assert next(results) == 0
    begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    results.close()
    assert go_on.is_set() and read == [0, 1] and not reading_threads()
