"""The BlockAttention kernels, on the CPU, against the float64 reference."""

from dataclasses import replace

import numpy as np
import pytest
import reference
from host_library import DTYPES, ROUNDOFF, Attention, attention_params

ALWAYS_SPLIT = 100  # thread blocks to fill: more than any case has, so the context is split into its tiles


def rounded(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    return {n: a.astype(DTYPES[dtype]) if a.dtype == np.float32 and n != "sinks" else a for n, a in arrays.items()}


def with_padding(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """NaN in the block rows that belong to no request, and context rows behind the last marker, NaN too."""
    made = dict(arrays)
    for name in ("q", "k", "v"):
        made[name] = arrays[name].copy()
        made[name][arrays["row_start"][-1] :] = np.nan
    for name in {"context_k", "context_v"} & arrays.keys():
        made[name] = np.concatenate((arrays[name], np.full_like(arrays["k"][:1], np.nan)))
    return made


def expected_outputs(arrays, attributes) -> tuple[np.ndarray, ...]:
    """The reference on these very numbers. Not causal, the kernels leave the block's rows behind the committed ones."""
    exact = {n: a.astype(np.float32) if a.dtype in DTYPES.values() else a for n, a in arrays.items()}
    out, *caches = reference.block_attention(**exact, **attributes)
    if not attributes["causal"]:
        _, *caches = reference.block_attention(**exact, **(attributes | {"causal": True}))
    return out, *caches


def compare(host, case, dtype: str, seed: int = 0, target_blocks: int = 1) -> None:
    arrays = rounded(case.inputs(seed), dtype)
    given = with_padding(arrays)
    before = {name: array.copy() for name, array in given.items()}
    host.seed(seed)
    found = host.block_attention(given, target_blocks=target_blocks, **case.attributes)
    out, *caches = expected_outputs(arrays, case.attributes)
    # Weights and outputs are rounded to the dtype once each, all else is fp32.
    values = [np.nan_to_num(arrays[n].astype(np.float64)) for n in ("v", "value_cache", "context_v") if n in arrays]
    largest = max((np.abs(v).max() for v in values if v.size), default=0)
    error = np.abs(found[0].astype(np.float64) - out)
    bound = ROUNDOFF[dtype] * (np.abs(out) + largest) + 1e-5 * max(largest, 1)
    # `not <=`: NaN fails.
    wrong = ~(error <= bound)
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} wrong, at {np.argwhere(wrong)[0]}, by {error.max()}"
    for name, ours, theirs in zip(("key cache", "value cache"), found[1:], caches, strict=True):
        np.testing.assert_array_equal(ours.astype(np.float64), theirs, err_msg=name)
    for name, array in before.items():
        assert given[name].tobytes() == array.tobytes(), f"{name} was written to"


@pytest.mark.parametrize("splits", ["whole", "split"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", reference.ATTENTION_CASES, ids=str)
def test_table(host, case, dtype, splits):
    compare(host, replace(case, depth=64), dtype, target_blocks=1 if splits == "whole" else ALWAYS_SPLIT)


@pytest.mark.parametrize("depth", [128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["verify", "long chunk", "ragged, paged", "draft, window", "padding, paged, window"])
def test_head_sizes(host, name, dtype, depth):
    case = next(c for c in reference.ATTENTION_CASES if c.name == name)
    compare(host, replace(case, depth=depth), dtype)


def random_case(seed: int) -> tuple[reference.AttentionCase, dict]:
    """Small, but over every edge: tiles of 16 to 64 keys and of 16 to 64 rows, pages, windows, splits."""
    rng = np.random.default_rng(seed)
    depth = int(rng.choice([64, 64, 64, 128, 128, 256, 512]))
    longest = {64: 150, 128: 150, 256: 70, 512: 40}[depth]
    causal, requests = bool(rng.integers(2)), int(rng.choice([1, 1, 2, 3]))
    kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 4, 7]))
    rows = int(rng.choice([1, 2, 7, 60 // requests, 60 // requests]))

    def draw(limit: int) -> tuple[int, ...]:
        limits = rng.choice([0, 1, limit // 4, limit, limit], size=requests)
        return tuple(int(rng.integers(0, most + 1)) for most in limits)

    blocks, lengths, contexts = draw(rows), draw(longest), draw(longest // 2)
    if sum(blocks) == 0:
        blocks = (1,) * requests
    if causal and rng.integers(3):
        contexts = None
    reach = max(length + block for length, block in zip(lengths, blocks, strict=True))
    case = reference.AttentionCase(
        f"random {seed}", blocks, lengths, contexts, causal,
        window=int(rng.choice([0, 0, 1, max(1, max(blocks)), reach, int(rng.integers(1, reach + 2))])),
        softcap=float(rng.choice([0, 0, 0.5, 3.0])), heads=kv_heads * group, kv_heads=kv_heads, depth=depth,
        page=[None, 1, 3, 16, 64][rng.integers(5)], padding=int(rng.choice([0, 0, 1, 5])),
    )  # fmt: skip
    how = {
        "dtype": [*DTYPES][rng.integers(3)],
        "target_blocks": int(rng.choice([1, 1, 16, 40, ALWAYS_SPLIT])),
    }
    case = replace(case, sinks=bool(rng.integers(4) == 0))
    if case.window and rng.integers(2):
        written = max(blocks) + max(contexts or (0,))
        case = replace(case, page=None, ring=written + int(rng.choice([0, 0, 1, 9])))
    return case, how


@pytest.mark.parametrize("seed", range(320))
def test_random(host, seed):
    case, how = random_case(seed)
    compare(host, case, seed=seed, **how)


def test_the_order_of_threads_does_not_matter(host):
    case = replace(next(c for c in reference.ATTENTION_CASES if c.name == "draft, long first context"), depth=64)
    arrays = rounded(case.inputs(), "fp16")
    found = []
    for seed in range(10):
        host.seed(seed)
        found.append(host.block_attention(arrays, target_blocks=16, **case.attributes)[0])
    assert all((other == found[0]).all() for other in found)


def test_rows_behind_the_capacity_are_dropped(host):
    case = reference.AttentionCase("too long", (4, 3), (2, 6), (3, 5), causal=True, depth=64)
    arrays = rounded(case.inputs(), "fp16")
    arrays |= {name: np.ascontiguousarray(arrays[name][:, :, :7]) for name in ("key_cache", "value_cache")}
    for target_blocks in (1, ALWAYS_SPLIT):
        out, keys, _ = host.block_attention(arrays, target_blocks=target_blocks, **case.attributes)
        assert np.isfinite(out.astype(np.float32)).all()
        first, second = arrays["pages"][:, 0]
        np.testing.assert_array_equal(keys[first, :, :2], arrays["key_cache"][first, :, :2])
        np.testing.assert_array_equal(keys[first, :, 2:5], arrays["context_k"][:3].swapaxes(0, 1))
        np.testing.assert_array_equal(keys[first, :, 5:7], arrays["k"][:2].swapaxes(0, 1))
        np.testing.assert_array_equal(keys[second, :, :6], arrays["key_cache"][second, :, :6])
        np.testing.assert_array_equal(keys[second, :, 6], arrays["context_k"][3])


def test_a_not_finite_row_stays_in_its_request(host):
    case = reference.AttentionCase("ragged", (3, 2), (70, 9), depth=64)
    arrays = rounded(case.inputs(), "fp16")
    clean = host.block_attention(arrays, target_blocks=1, **case.attributes)[0]
    arrays["k"][1] = np.nan
    arrays["v"][1] = np.inf
    out = host.block_attention(arrays, target_blocks=1, **case.attributes)[0]
    assert not np.isfinite(out[1:3].astype(np.float32)).any()
    np.testing.assert_array_equal(out[3:], clean[3:])


def test_what_does_not_fit_is_refused(host):
    case = reference.AttentionCase("verify", (6,), (40,), depth=64)
    arrays = rounded(case.inputs(), "fp16")
    arrays["out"] = np.zeros_like(arrays["q"])

    def status(workspace_bytes: int | None = None, **changes) -> str:
        params = attention_params(arrays, target_blocks=64, **case.attributes)
        for name, value in changes.items():
            assert hasattr(Attention, name)
            setattr(params, name, value)
        return host.status_text(host.attention_status(params, workspace_bytes))

    assert status() == "ok"
    assert "null" in status(q=None)
    assert "aligned" in status(key_cache=arrays["key_cache"].ctypes.data + 2)
    assert "null" in status(context_k=arrays["k"].ctypes.data)  # without the other two
    assert "size" in status(kv_heads=3)
    assert "size" in status(requests=0)
    assert "size" in status(window=-1)
    assert "size" in status(cache_pages=2**30)
    assert "head size" in status(head_size=96)
    assert "dtype" in status(dtype=3)
    assert "workspace" in status(workspace_bytes=64, request_pages=4)
    assert status(rows=0, q=None, k=None, v=None, out=None) == "ok"
