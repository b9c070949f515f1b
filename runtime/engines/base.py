"""What the stages ask of an engine. A backend is one class with these members; the stages know nothing else of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from dspark.manifest import CachePair, Graph, Tensor, ring_rows

# The one input that may be left out of a run: where no temperature is above 0 no engine reads it. It is as large as the
# draft logits, so a greedy draft makes none, copies none and uploads none: the engine binds memory that nobody wrote.
NOISE = "noise"


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


@dataclass(frozen=True)
class CacheRows:
    """Rows of an engine's caches. Those of layers with a window are rings where that makes them smaller."""

    capacity: int  # of the others
    ring: int
    most: int | None  # Engine.most_rows

    @classmethod
    def of(cls, graph: Graph, capacity: int, slack: int) -> Self:
        """Rings of the window and `slack` rows more."""
        ring = ring_rows(graph, capacity, slack)
        return cls(capacity, ring, slack if graph.window and ring < capacity else None)

    def __getitem__(self, pair: CachePair) -> int:
        return self.ring if pair.window else self.capacity

    @property
    def pages(self) -> int:
        """How often a request's page is named in its row of `pages`: row i of a ring is found at i // ring."""
        return 1 if self.most is None else -(-self.capacity // self.ring)


class Engine(Protocol):
    """One graph of a bundle, ready to run, together with the K/V caches that it updates in place.

    The stages hand over the inputs of the portable graph form, in numpy; an engine of another form leaves out those
    that its graph does not have (a one-request graph needs no row markers or pages). A run takes any requests in any
    order; `pages` [R, 1] names their places, and an engine with rings names each as often as its graph wants. Which
    cache rows mean something is the stages' business: they say it with `length` in every run, so that forgetting rows
    costs nothing. Where `length` is 0 the states of recurrent layers are taken as 0 too, whatever they are.
    """

    requests: int  # how many there is room for: their places are 0..requests - 1
    capacity: int  # rows that a request may have; of every K/V cache, but for rings
    # How many may be written behind the committed ones, so that no ring loses what it needs; None: any number.
    most_rows: int | None
    slots: int  # after how many of a run's last rows `keep` can find the states; 0: there are none, only caches
    owners: dict[int, object]  # by place, whose rows the caches hold there; kept by those who run the engine
    seconds: float  # wall time spent inside runs so far: what is left of a round is the host's own work
    version: str  # of the library that runs it
    sha256: str  # of its graph or engine: with the version, what a measurement of it holds for

    @property
    def inputs(self) -> Mapping[str, Tensor]:
        """What the graph takes by name, caches left out."""
        ...

    def run(self, inputs: Mapping[str, Any], fetch: Sequence[str]) -> dict[str, Any]:
        """Run once and return the outputs named in `fetch`, and no others. Taps may be any `Rows`, the rest is numpy.
        NOISE may be left out where every temperature is 0.

        The arrays are views of buffers that the next run overwrites: copy what must live longer. The K/V caches are
        updated in place at the rows that the graph writes; states of recurrent layers change in `keep` alone.
        """
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Of each request of the last run, in its order, the first so many rows are committed; 0: none, as if it had
        not run. Once after a run at most.

        For caches there is nothing to do. The states become those after the last committed row, which must be one of
        the request's last `slots` rows.
        """
        ...
