"""An engine for many requests out of engines for one: each request of a run goes to the engine of its place."""

from collections.abc import Sequence

import numpy as np

from dspark.runtime.engines.base import NOISE


class Together:
    """An Engine. What one of its requests gets cannot depend on the others, rounding included."""

    def __init__(self, engines: Sequence):
        self.engines = engines
        self.requests = len(engines)
        self.owners: dict[int, object] = {}
        self.seconds = 0.0

    def __getattr__(self, name):
        return getattr(self.engines[0], name)

    def run(self, inputs, fetch):
        self.places = inputs["pages"][:, 0].tolist()
        parts = [self.engines[place].run(self._alone(inputs, r), fetch) for r, place in enumerate(self.places)]
        return {name: np.concatenate([part[name] for part in parts]) for name in fetch}

    def keep(self, rows):
        for place, count in zip(self.places, rows, strict=True):
            self.engines[place].keep([count])

    def _alone(self, inputs, request: int) -> dict:
        one = slice(request, request + 1)
        rows = slice(*inputs["row_start"][request : request + 2].tolist())
        given = {
            "length": inputs["length"][one],
            "pages": np.zeros((1, 1), np.int32),
            "row_start": np.array([0, rows.stop - rows.start], np.int32),
        }
        if "logit_rows" in inputs:
            asked = inputs["logit_rows"]
            given |= {name: inputs[name][rows] for name in ("tokens", "positions")}
            return given | {"logit_rows": asked[(asked >= rows.start) & (asked < rows.stop)] - rows.start}
        context = slice(*inputs["context_start"][request : request + 2].tolist())
        given |= {name: inputs[name][one] for name in ("tokens", "positions", "temperature")}
        given |= {name: inputs[name][context] for name in ("taps", "context_positions")}
        given["context_start"] = np.array([0, context.stop - context.start], np.int32)
        if given["temperature"][0] > 0:
            given[NOISE] = inputs[NOISE][one]
        return given
