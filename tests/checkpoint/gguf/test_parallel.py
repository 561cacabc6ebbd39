"""Pieces computed by several threads come in order, a few at a time, with their errors."""

import threading

import pytest

from mlxlm.checkpoint.gguf.parallel import parallel_map


@pytest.fixture(params=[1, 2, 8])
def cores(request, monkeypatch):
    monkeypatch.setattr("mlxlm.backend.platform.cpu_cores", lambda: request.param)
    return request.param


def test_the_order_is_that_of_the_pieces(cores):
    assert list(parallel_map(lambda i: i * i, range(50))) == [i * i for i in range(50)]
    assert list(parallel_map(str, [])) == []


def test_pieces_are_drawn_when_they_are_needed(cores):
    drawn = []
    results = parallel_map(str, (drawn.append(i) or i for i in range(1000)))
    assert [next(results), next(results)] == ["0", "1"]
    assert len(drawn) <= cores + 2
    results.close()


@pytest.mark.parametrize("where", ["function", "pieces"])
def test_an_error_is_passed_on_and_ends_all(cores, where):
    def odd(i):
        if i == 7:
            raise ValueError("seven")
        return i

    def pieces():
        yield from map(odd, range(100)) if where == "pieces" else range(100)

    found, before = [], threading.active_count()
    with pytest.raises(ValueError, match="seven"):
        found.extend(parallel_map(odd if where == "function" else int, pieces()))
    assert found == list(range(len(found))) and len(found) <= 7
    assert threading.active_count() == before
