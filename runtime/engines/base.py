"""What the stages ask of an engine. A backend is one class with these members; the stages know nothing else of it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np


class Engine(Protocol):
    """One graph of a bundle, ready to run, together with the K/V caches that it updates in place.

    The stages hand over the inputs of the portable graph form, in numpy; an engine of another form leaves out those
    that its graph does not have (a one-request graph needs no row markers or pages). Which cache rows mean something is
    the stages' business: they say it with `length` in every run, so that forgetting rows costs nothing.
    """

    capacity: int  # rows of every K/V cache
    owner: object  # whose rows the caches hold; set and compared by those who run the engine
    seconds: float  # wall time spent inside runs so far: what is left of a round is the host's own work

    def run(self, inputs: Mapping[str, np.ndarray], fetch: Sequence[str]) -> dict[str, np.ndarray]:
        """Run once and return the outputs named in `fetch`, and no others.

        The arrays are views of buffers that the next run overwrites: copy what must live longer. The K/V caches are
        updated in place at the rows that the graph writes.
        """
        ...
