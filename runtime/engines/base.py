"""What the stages ask of an engine. A backend is one class with these members; the stages know nothing else of it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np


class Rows(Protocol):
    """Rows [n, width] that an engine gives or takes: a numpy array, or an engine's own in its device's memory.

    numpy can make an array of any: np.asarray(rows).
    """

    @property
    def ndim(self) -> int: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, rows: slice) -> Self: ...
    def copy(self) -> Self: ...


def join_rows(parts: Sequence[Any]) -> Any:
    """All rows of `parts` as one; on the device where all are there."""
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate([np.asarray(part) for part in parts])
    return parts[0].join(parts)


class Engine(Protocol):
    """One graph of a bundle, ready to run, together with the K/V caches that it updates in place.

    The stages hand over the inputs of the portable graph form, in numpy; an engine of another form leaves out those
    that its graph does not have (a one-request graph needs no row markers or pages). Which cache rows mean something is
    the stages' business: they say it with `length` in every run, so that forgetting rows costs nothing.
    """

    capacity: int  # rows of every K/V cache
    owner: object  # whose rows the caches hold; set and compared by those who run the engine
    seconds: float  # wall time spent inside runs so far: what is left of a round is the host's own work

    def run(self, inputs: Mapping[str, Any], fetch: Sequence[str]) -> dict[str, Any]:
        """Run once and return the outputs named in `fetch`, and no others. Taps may be any `Rows`, the rest is numpy.

        The arrays are views of buffers that the next run overwrites: copy what must live longer. The K/V caches are
        updated in place at the rows that the graph writes.
        """
        ...
