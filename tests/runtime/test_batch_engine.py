"""The engines of a batch: ragged steps of any places, equal to each request run alone in the one-request form."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
from pairs import PAIRS

from dspark.errors import DSparkError, UsageError
from dspark.runtime.bundle import Bundle, open_bundle
from dspark.runtime.engines.onnxruntime import BATCH_FORM, OnnxRuntimeEngine
from dspark.runtime.engines.open import open_engines

PLACES, CAPACITY, SLACK = 4, 150, 12
SIZES = (1, 1, 1, 2, 4, 8, SLACK)  # rows that a request brings; rings take no more than SLACK
ATOL = 1e-5


@pytest.fixture(scope="module", params=PAIRS)
def bundle(pairs, request):
    return open_bundle(pairs(request.param).bundle)


@functools.cache
def engine_of(folder: Path, role: str, requests: int, which: int = 0) -> OnnxRuntimeEngine:
    return OnnxRuntimeEngine(open_bundle(folder), role, CAPACITY, 1, slack=SLACK, requests=requests)


@functools.cache
def alone_of(folder: Path, role: str) -> list[OnnxRuntimeEngine]:
    """One-request engines, one for each place."""
    return [engine_of(folder, role, 1, place) for place in range(PLACES)]


class Requests:
    """Requests at the places of a batch's engine, each run alone as well. Between steps everything that is not
    committed is NaN: rows, and caches and states of requests that take no part."""

    def __init__(self, bundle: Bundle, role: str):
        self.many, self.alone = engine_of(bundle.folder, role, PLACES), alone_of(bundle.folder, role)
        self.lengths = [0] * PLACES
        self.kept = {name: array.copy() for name, array in self._memory()}
        for _, array in self._memory():
            array.fill(np.nan)

    def _memory(self):
        return [*self.many.caches.items(), *self.many.states.items()]

    def run(self, places, inputs, fetch) -> list[tuple[dict, dict]]:
        """(a request's own inputs, what all of them gave at once) -> for each what it got, together and alone."""
        self._hide(places)
        found = self.many.run(_joined(places, inputs), fetch)
        found = {name: value.copy() for name, value in found.items()}
        self._compare_others(places)
        answers, row = [], 0
        for i, (place, own) in enumerate(zip(places, inputs, strict=True)):
            expected = self.alone[place].run(own, fetch)
            rows = len(own["tokens"])
            flat = own["tokens"].ndim == 1
            mine = {n: value[row : row + rows] if flat else value[i : i + 1] for n, value in found.items()}
            answers.append((mine, {n: value.copy() for n, value in expected.items()}))
            row += rows
        return answers

    def commit(self, places, counts, inputs) -> None:
        """Alone, a request with states runs the rows that it keeps again: the state is then the one behind the last."""
        self.many.keep(counts)
        for place, count, own in zip(places, counts, inputs, strict=True):
            if count and self.many.slots:
                self.alone[place].run(target_inputs(own["tokens"][:count], self.lengths[place]), ())
                self.alone[place].keep([count])
            self.lengths[place] += count
            for name, state in self.many.states.items():
                if self.lengths[place]:
                    np.testing.assert_allclose(state[place], self.alone[place].states[name][0], atol=ATOL)
        self._save(places)

    def _rows(self, pair, place) -> np.ndarray:
        """The rows of a cache that a later step of this request may read."""
        size, length = self.many.caches[pair.input].shape[2], self.lengths[place]
        least = max(0, length - pair.window) if pair.window else 0
        return np.arange(least, length) % size

    def _hide(self, places) -> None:
        for pair in self.many.graph.caches:
            cache = self.many.caches[pair.input]
            cache.fill(np.nan)
            for place in places:
                rows = self._rows(pair, place)
                cache[place][:, rows] = self.kept[pair.input][place][:, rows]
        for name, state in self.many.states.items():
            state.fill(np.nan)
            for place in places:
                if self.lengths[place]:
                    state[place] = self.kept[name][place]

    def _compare_others(self, places) -> None:
        """A step touches its own requests' pages alone, and none of the committed rows there."""
        others = [place for place in range(PLACES) if place not in places]
        for name, array in self._memory():
            assert np.isnan(array[others]).all(), name
        for pair in self.many.graph.caches:
            for place in places:
                rows = self._rows(pair, place)
                ours, before = (caches[pair.input][place][:, rows] for caches in (self.many.caches, self.kept))
                np.testing.assert_array_equal(ours, before)

    def _save(self, places) -> None:
        for name, array in self._memory():
            self.kept[name][list(places)] = array[list(places)]


def _joined(places, inputs) -> dict[str, np.ndarray]:
    """The inputs of a step of all these requests."""
    made = {}
    for name in inputs[0]:
        parts = [own[name] for own in inputs]
        if name == "logit_rows":
            before = np.cumsum([0, *(len(own["tokens"]) for own in inputs)])
            parts = [part + at for part, at in zip(parts, before, strict=False)]
        if name.endswith("_start"):
            made[name] = np.cumsum([0, *(part[1] for part in parts)]).astype(np.int32)
        else:
            made[name] = np.concatenate(parts)
    return made | {"pages": np.array(places, np.int32)[:, None]}


def target_inputs(tokens, length) -> dict[str, np.ndarray]:
    return {
        "tokens": np.asarray(tokens),
        "positions": np.arange(length, length + len(tokens)),
        "row_start": np.array([0, len(tokens)], np.int32),
        "length": np.array([length], np.int32),
        "logit_rows": np.arange(len(tokens)),
    }


def subset(rng) -> list[int]:
    return rng.permutation(PLACES)[: rng.integers(1, PLACES + 1)].tolist()


def test_targets_steps(bundle):
    requests, rng = Requests(bundle, "target"), np.random.default_rng(0)
    vocab, slots = bundle.manifest.target.vocab_size, requests.many.slots
    for _ in range(25):
        places = subset(rng)
        inputs, counts = [], []
        for place in places:
            if rng.random() < 0.1 or requests.lengths[place] + SLACK > CAPACITY:
                requests.lengths[place] = 0  # a new request
            size = int(rng.choice(SIZES))
            inputs.append(target_inputs(rng.integers(vocab, size=size), requests.lengths[place]))
            # All rows, some, or none; of recurrent layers only the states behind the last rows are there.
            kept = int(rng.choice([size, rng.integers(size + 1)]))
            counts.append(size if kept and 0 < slots <= size - kept else kept)
        for found, expected in requests.run(places, inputs, ("logits", "taps")):
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, atol=ATOL, rtol=ATOL, err_msg=name)
        requests.commit(places, counts, inputs)


def drafter_inputs(bundle, rng, length, rows, size, temperature) -> dict[str, np.ndarray]:
    drafter, taps = bundle.manifest.drafter, bundle.manifest.graph("drafter", BATCH_FORM).inputs
    width = next(tensor.shape[1] for tensor in taps if tensor.name == "taps")
    noise = np.full((1, size, drafter.draft_vocab_size), np.nan, np.float32)  # of a greedy request nobody reads it
    if temperature:
        noise[:] = rng.gumbel(size=noise.shape)
    tokens = np.full((1, size), drafter.mask_token_id)
    tokens[0, 0] = rng.integers(bundle.manifest.target.vocab_size)
    return {
        "tokens": tokens,
        "positions": np.arange(length + rows, length + rows + size)[None],
        "taps": rng.normal(size=(rows, width)).astype(np.float32),
        "context_positions": np.arange(length, length + rows),
        "row_start": np.array([0, size], np.int32),
        "context_start": np.array([0, rows], np.int32),
        "length": np.array([length], np.int32),
        "noise": noise,
        "temperature": np.array([temperature], np.float32),
    }


def test_drafters_steps(bundle):
    """Contexts of many rows, of one and of none; greedy and drawn requests in one step; blocks of every length."""
    requests, rng, block = Requests(bundle, "drafter"), np.random.default_rng(1), bundle.manifest.drafter.block_size
    fetch = tuple(tensor.name for tensor in bundle.manifest.graph("drafter", BATCH_FORM).outputs)
    for step in range(20):
        places, size = subset(rng), 1 + step % block
        rows = []
        for place in places:
            if requests.lengths[place] + 50 + block > CAPACITY:
                requests.lengths[place] = 0
            rows.append(int(rng.choice([1, 2, 8, 40] if not requests.lengths[place] else [0, 1, 2, 8, 40])))
        heats = rng.choice([0, 0.7, 1.3], size=len(places))
        inputs = [
            drafter_inputs(bundle, rng, requests.lengths[place], n, size, heat)
            for place, n, heat in zip(places, rows, heats, strict=True)
        ]
        if not heats.any():  # as the runtime does then
            for own in inputs:
                del own["noise"]
        for found, expected in requests.run(places, inputs, fetch):
            np.testing.assert_array_equal(found["draft_tokens"], expected["draft_tokens"])
            for name in set(fetch) - {"draft_tokens"}:
                np.testing.assert_allclose(found[name], expected[name], atol=ATOL, rtol=ATOL, err_msg=name)
        requests.commit(places, rows, inputs)


@pytest.fixture(scope="module")
def vanilla(pairs):
    return open_bundle(pairs("qwen3-vanilla").bundle)


def test_the_rows_of_a_run_that_is_all_of_one_request(vanilla):
    """Whatever the other places hold: a batch of one equals the one-request form."""
    many, one = engine_of(vanilla.folder, "target", PLACES), engine_of(vanilla.folder, "target", 1)
    inputs = target_inputs(np.arange(60), 0)
    expected = {name: value.copy() for name, value in one.run(inputs, ("logits", "taps")).items()}
    for place in range(PLACES):
        found = many.run(_joined([place], [inputs]), ("logits", "taps"))
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, atol=ATOL, rtol=ATOL)


def test_logits_of_some_rows_alone(vanilla):
    many = engine_of(vanilla.folder, "target", PLACES)
    step = _joined([2, 0], [target_inputs(np.arange(n), 0) for n in (5, 3)])
    whole = many.run(step, ("logits",))["logits"].copy()
    rows = np.array([7, 4, 4])
    np.testing.assert_allclose(many.run(step | {"logit_rows": rows}, ("logits",))["logits"], whole[rows], atol=ATOL)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
@pytest.mark.parametrize("role", ["target", "drafter"])
def test_caches_take_memory_when_they_are_written(vanilla, role):
    """None of them is copied: as large as these are, a copy would show."""
    before = resident()
    engine = OnnxRuntimeEngine(vanilla, role, 300_000, 1, requests=8)
    total = sum(cache.nbytes for cache in engine.caches.values())
    assert total > 2**30
    if role == "target":
        inputs = [target_inputs(np.arange(4), 0), target_inputs(np.arange(1), 0)]
    else:
        inputs = [drafter_inputs(vanilla, np.random.default_rng(0), 0, n, 3, 0.0) for n in (5, 1)]
    buffers = {name: cache.ctypes.data for name, cache in engine.caches.items()}
    for _ in range(2):
        engine.run(_joined([6, 1], inputs), ())
    assert resident() - before < total / 8
    assert {name: cache.ctypes.data for name, cache in engine.caches.items()} == buffers
    written = [place for place in range(8) if all(cache[place, :, :3].any() for cache in engine.caches.values())]
    assert written == [1, 6]


def test_requests_of_engines(vanilla):
    for requests, form in ((1, "onnxruntime-cpu"), (3, BATCH_FORM)):
        for engine in open_engines(vanilla, ("target", "drafter"), "onnxruntime", 64, 1, requests):
            assert engine.requests == requests and engine.graph.form == form
            assert {len(cache) for cache in engine.caches.values()} == {requests}
            assert engine.capacity == 64 + vanilla.manifest.drafter.block_size


def test_a_bundle_of_an_older_version(vanilla):
    io = tuple(graph for graph in vanilla.manifest.io if graph.form != BATCH_FORM)
    old = Bundle(vanilla.folder, dataclasses.replace(vanilla.manifest, io=io))
    open_engines(old, ("target",), "onnxruntime", 64, 1)
    with pytest.raises(UsageError, match=f"no target graph in form '{BATCH_FORM}' .*; export it again"):
        open_engines(old, ("target",), "onnxruntime", 64, 1, requests=2)


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_tensorrt_runs_one_request(vanilla, backend):
    with pytest.raises(
        UsageError, match=f"backend {backend}: .* one request at a time, not 8; use backend onnxruntime"
    ):
        open_engines(vanilla, ("target",), backend, 64, requests=8)


def test_caches_that_fit_in_no_memory(vanilla):
    with pytest.raises(DSparkError, match=r"cpu-batch\.onnx: no memory for K/V caches of 1\d+ rows for 4 requests"):
        OnnxRuntimeEngine(vanilla, "target", 10**13, requests=4)
