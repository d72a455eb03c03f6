"""What an ordinary run leaves out of full products: cells all of whose pairs of values are met in
others.

    CELLS = list(itertools.product(SOURCES, TARGETS, FAMILIES))
    @pytest.mark.parametrize(("source", "target", "name"), thinned(CELLS))

The cells left out bear the mark `thorough`; `python3 tools/check.py --thorough` runs them as well.
Which ones they are depends on the cells and their order alone. Whatever pair of values a cell has,
it is in one that an ordinary run has.
"""

from __future__ import annotations

import heapq
import itertools
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

__all__ = ["covering", "pairs", "seeds", "thinned", "thorough"]

Cell = Sequence[Hashable]


def pairs(cell: Cell) -> set[tuple[Any, ...]]:
    """Return the pairs of values of a cell, each value with its dimension; of one dimension the
    value alone.
    """
    values = list(enumerate(cell))
    return set(itertools.combinations(values, min(2, len(values))))


def covering(cells: Sequence[Iterable[Cell]]) -> set[int]:
    """Return the places of few cells that have every pair that any has; each is given by one view
    of it or more.

    Greedy: the cell with most pairs that are still to be met, the first of equals; then those that
    the later ones made needless go.
    """
    wanted = [
        {(view, pair) for view, cell in enumerate(views) for pair in pairs(cell)} for views in cells
    ]
    missing: set[Any] = set().union(*wanted)
    chosen: list[int] = []
    heap = [(-len(each), place) for place, each in enumerate(wanted)]
    heapq.heapify(heap)
    while missing:
        _, place = heapq.heappop(heap)
        left = -len(wanted[place] & missing)
        if heap and (left, place) > heap[0]:  # fewer than when it was counted: others may have more
            heapq.heappush(heap, (left, place))
            continue
        chosen.append(place)
        missing -= wanted[place]
    met = [pair for place in chosen for pair in wanted[place]]
    often = Counter(met)
    for place in chosen[:]:
        if all(often[pair] > 1 for pair in wanted[place]):
            chosen.remove(place)
            for pair in wanted[place]:
                often[pair] -= 1
    return set(chosen)


def thinned(cells: Iterable[Any], *views: Callable[[Any], Cell]) -> list[Any]:
    """Return the cells as parameters, marked `thorough` where no pair of values is met in them
    alone.

    Cells are tuples of values, or parameters of pytest's; a view returns a cell's values in all
    dimensions. With several views the pairs of each are met.
    """
    params = [
        each if hasattr(each, "values") and hasattr(each, "marks") else pytest.param(*each)
        for each in cells
    ]
    asked = views or (lambda cell: cell,)
    kept = covering([[view(each.values) for view in asked] for each in params])
    return [each if place in kept else thorough(each) for place, each in enumerate(params)]


def seeds(variable: str, ordinary: int, most: int) -> list[Any]:
    """Return `most` seeds from 0, of which an ordinary run has the first ones; or those that an
    environment variable says: 1000:500 are five hundred from 1000.
    """
    if variable in os.environ:
        first, count = map(int, os.environ[variable].split(":"))
        return [*range(first, first + count)]
    return [*range(ordinary), *(thorough(pytest.param(seed)) for seed in range(ordinary, most))]


def thorough(param: Any) -> Any:
    """Return a parameter that an ordinary run leaves out."""
    return pytest.param(*param.values, id=param.id, marks=[*param.marks, pytest.mark.thorough])
