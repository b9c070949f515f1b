"""benchmarks/gpu_kernels.py without a GPU: its floors, its verdicts, and all of it over the host shim at tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

import gpu_cases
import gpu_kernels
import gpu_shapes
import host_library
import pytest
import torch
from gpu_shapes import AcceptShape, AttentionShape, MarkovShape, judge, record
from gpu_timing import CpuClock

ROOT = Path(__file__).parents[2]
MB = 1e6


@pytest.fixture(scope="module")
def library() -> Path:
    if missing := host_library.missing_tools():
        pytest.skip(f"{', '.join(missing)} not found")
    return host_library.build() / "libdspark_host.so"


# ---- Floors: the README's tables, and the bytes of the very tensors.


def test_floors_are_those_of_the_readme():
    """plugins/README.md: 16.8 + 0.15 MB; 544.5 + 2.1 MB, heads 2.2 and 9.4 MB more; 2.4 MB, drawn 7.6 MB."""
    assert AttentionShape(1, 6, 4096).floor_bytes() == 4096 * 4096 + 24_576 * 6
    assert MarkovShape(1).floor_bytes() / MB == pytest.approx(544.5 + 2.1, abs=0.1)
    for head, more in (("gated", 2.2), ("rnn", 9.4)):
        assert (MarkovShape(1, head).floor_bytes() - MarkovShape(1).floor_bytes()) / MB == pytest.approx(more, abs=0.1)
    assert AcceptShape(1).floor_bytes() / MB == pytest.approx(2.4, abs=0.1)
    assert AcceptShape(1, drawn=True).floor_bytes() / MB == pytest.approx(7.6, abs=0.1)


@pytest.mark.parametrize("shape", gpu_shapes.tiny_plan()["block_attention"], ids=str)
def test_floor_of_attention_is_its_tensors(shape):
    t = gpu_cases.AttentionCase(shape, CpuClock()).tensors
    read = [t["q"], t["k"], t["v"], t["key_cache"][:, :, : shape.context], t["value_cache"][:, :, : shape.context]]
    written = [t["out"]]
    if shape.causal:
        written += [t["k"], t["v"]]
    if shape.fresh:
        read += [t["context_k"], t["context_v"]]
        written += [t["context_k"], t["context_v"]]
    assert shape.floor_bytes() == sum(2 * tensor.numel() for tensor in read + written)


@pytest.mark.parametrize("shape", gpu_shapes.tiny_plan()["markov_argmax"], ids=str)
def test_floor_of_the_chain_is_its_tensors(shape):
    t = gpu_cases.MarkovCase(shape, CpuClock()).tensors
    numbers = shape.gamma * t["w2"].numel() + t["base_logits"].numel()
    if shape.head != "vanilla":  # the columns of h_k once, all others in every step
        weight = t["head_weight"].numel()
        of_hidden = t["head_weight"].shape[0] * shape.hidden
        numbers += of_hidden + shape.gamma * (weight - of_hidden)
    assert shape.floor_bytes() == 2 * numbers


@pytest.mark.parametrize("drawn", [False, True])
def test_floor_of_acceptance_is_its_tensors(drawn):
    shape = AcceptShape(3, drawn, gamma=3, vocab=90)
    t = gpu_cases.AcceptCase(shape, CpuClock()).tensors
    again = [t[name][:3] for name in ("target_logits",)] + [t["draft_logits"][:, 0]] if drawn else []
    read = [t["target_logits"], *([t["draft_logits"]] if drawn else []), *again]
    assert shape.floor_bytes() == sum(tensor.nbytes for tensor in read)


# ---- Verdicts, from made-up times.


def made_up(kernel_us: float, requests: int = 8, passed: bool = True, eager_us: float = 900.0) -> dict:
    times = {"kernel": [kernel_us + 20, kernel_us + 10, kernel_us + 90], "kernel, graph": [kernel_us] * 3}
    times |= {"torch, eager": [eager_us], "torch, eager, graph": [eager_us / 2]}
    return record(MarkovShape(requests), times, check={"passed": passed})


def report(*rows: dict, attention: tuple = ()) -> dict:
    kernels = {"markov_argmax": [*rows], "block_attention": [*attention], "accept": []}
    return {"copies": [{"bytes_per_second": 3e12}, {"bytes_per_second": 4e12}], "kernels": kernels}


def test_ratios_use_the_fastest_copy_and_the_graph():
    made = judge(report(made_up(200.0)))
    (row,) = made["kernels"]["markov_argmax"]
    floor = MarkovShape(8).floor_bytes() / 4e12 * 1e6
    assert made["copy_bytes_per_second"] == 4e12
    assert row["floor_us"] == pytest.approx(floor)
    assert row["ratio"] == pytest.approx(floor / 200)
    assert row["ratio_direct"] == pytest.approx(floor / 220)  # the median of 210, 220, 290
    assert row["times_faster_than"] == pytest.approx({"torch, eager": 900 / 220, "torch, eager, graph": 450 / 200})


def test_verdicts_are_of_the_worst_configuration():
    floor = MarkovShape(8).floor_bytes() / 4e12 * 1e6
    good, bad, small = made_up(floor / 0.9), made_up(floor / 0.6), made_up(floor / 0.1, requests=1)
    verdicts = judge(report(good, bad, small))["verdicts"]
    chain = verdicts["markov_argmax"]
    assert (chain["met"], chain["configurations"]) == (False, 2)  # one request is not asked for
    assert chain["worst"] == pytest.approx(0.6) and len(chain["below"]) == 1
    assert judge(report(good, small))["verdicts"]["markov_argmax"]["met"]
    # The eager loop is compared at every number of requests.
    assert verdicts["markov_argmax, eager"]["configurations"] == 3
    assert verdicts["block_attention"] == {
        "what": "share of the copy's bandwidth, R >= 8",
        "required": 0.7,
        "met": None,
        "why": "not measured",
    }


def test_a_wrong_result_and_a_configuration_without_times_make_no_verdict():
    wrong, broken = made_up(1.0, passed=False), {"shape": {"requests": 8}, "error": "out of memory"}
    assert judge(report(wrong, broken))["verdicts"]["markov_argmax"]["met"] is None
    assert judge({"copies": [], "kernels": {"markov_argmax": [made_up(1.0)]}})["copy_bytes_per_second"] is None


def test_the_plan_has_every_number_of_requests():
    plan = gpu_shapes.full_plan()
    for kernel, shapes in plan.items():
        assert len(set(shapes)) == len(shapes), kernel
        assert {shape.requests for shape in shapes} == {1, 2, 4, 8, 16, 32, 64}, kernel
    assert {(s.context, s.requests) for s in plan["block_attention"]} >= {
        (context, requests) for context in (512, 2048, 8192, 32768) for requests in gpu_shapes.REQUESTS
    }
    assert {shape.block for shape in plan["block_attention"]} == {6, 7, 8}


# ---- All of it, with the kernels on the CPU.


def test_it_runs_over_the_host_shim(library, tmp_path):
    out = tmp_path / "kernels.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_kernels.py", "--library", library, "--out", out]
    done = subprocess.run([*command, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert made["not_run"] == [] and len(made["copies"]) == 4
    for kernel, shapes in gpu_shapes.tiny_plan().items():
        rows = made["kernels"][kernel]
        assert [row["shape"] for row in rows] == [vars(shape) for shape in shapes]
        for row in rows:
            assert row["check"]["passed"] and row["check"]["repeatable"], row
            assert row["torch_not_run"] == {}
            assert max(row["check"]["torch"].values()) < 0.05, row  # torch computes the same
            assert row["ratio"] > 0 and {"kernel", "kernel, graph"} <= row["times"].keys()
    assert all(verdict["configurations"] > 0 for verdict in made["verdicts"].values())
    rows = {"torch, SDPA", "torch, SDPA, heads as rows", "torch, SDPA, causal_lower_right"}
    assert made["kernels"]["block_attention"][0]["check"]["torch"].keys() == rows


def test_without_time_nothing_is_measured_and_it_says_so(library, tmp_path):
    out = tmp_path / "kernels.json"
    command = [sys.executable, ROOT / "benchmarks" / "gpu_kernels.py", "--library", library, "--out", out]
    subprocess.run([*command, "--device", "cpu", "--seconds", "0"], check=True, capture_output=True)
    made = json.loads(out.read_text())
    assert {row["why"] for row in made["not_run"]} == {"no time left"}
    assert all(rows == [] for rows in made["kernels"].values())
    assert all(verdict["met"] is None for verdict in made["verdicts"].values())


SHAPES = [shapes[0] for shapes in gpu_shapes.tiny_plan().values()] + [AcceptShape(3, True, gamma=3, vocab=90)]
KERNEL_OF = {MarkovShape: "markov_argmax", AttentionShape: "block_attention", AcceptShape: "accept"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_wrong_result_is_found(library, shape):
    """Every output in turn: left unwritten, and off in one element."""
    clock = CpuClock()
    kernels = gpu_kernels.Kernels(library, clock)
    case = gpu_cases.CASES[KERNEL_OF[type(shape)]](shape, clock)
    unwritten = {name: case.tensors[name].clone() for name in case.outputs}

    def launch(more: dict) -> None:
        kernels.launcher(case.kernel, case.params(), case.tensors | more)()

    launch({})
    right = {name: case.tensors[name].clone() for name in case.outputs}
    assert case.check(launch)["passed"]
    for name in case.outputs:
        off = right[name].clone()
        off.view(-1)[-1] = off.view(-1)[-1] + (3 if off.dtype in (torch.bfloat16, torch.float32) else 1)
        for wrong in (unwritten[name], off):
            case.tensors[name].copy_(wrong)
            assert not case.check(launch)["passed"], name
            case.tensors[name].copy_(right[name])
    assert case.check(launch)["passed"]


def test_a_refused_call_says_why(library):
    clock = CpuClock()
    case = gpu_cases.AttentionCase(SHAPES[1], clock)
    params = case.params()
    params.head_size = 96
    with pytest.raises(RuntimeError, match="block_attention: the head size is none of"):
        gpu_kernels.Kernels(library, clock).launcher("block_attention", params, case.tensors)()
