"""Clocks for gpu_kernels.py: one for a CUDA GPU, one for the CPU, where the kernels run on the host shim."""

import statistics
import time
from collections.abc import Callable

import torch

Run = Callable[[], object]


class CudaClock:
    """Times with CUDA events on the current device, in turn, each from a level 2 cache full of something else."""

    device = "cuda"

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(0)
        self.multiprocessors = properties.multi_processor_count
        self.cache_bytes = getattr(properties, "L2_cache_size", 0)
        # Read and not written, so that no dirty lines are left whose way to memory would be timed. Its time also lets
        # the host get ahead: what is timed is not how fast it launches, unless there are many launches.
        self._flush = torch.ones(max(4 * self.cache_bytes, 256 << 20) // 4, device=self.device)

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def finish(self) -> None:
        """Waits; raises what a kernel did wrong."""
        torch.cuda.synchronize()

    def captured(self, run: Run) -> Run:
        """The same as one CUDA graph."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are loaded and libraries set up before the capture
            run()
            run()
        torch.cuda.current_stream().wait_stream(side)
        self.finish()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def microseconds(self, runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
        """Each run 5 to 40 times, in turn, in about `seconds`."""
        for run in runs.values():
            run()
        self.finish()
        began = time.perf_counter()
        self._round(runs)
        self.finish()
        repeats = int(seconds / (time.perf_counter() - began))
        rounds = [self._round(runs) for _ in range(max(5, min(40, repeats)))]
        self.finish()
        return {name: [begin.elapsed_time(end) * 1e3 for begin, end in (r[name] for r in rounds)] for name in runs}

    def _round(self, runs: dict[str, Run]) -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = {}
        for name, run in runs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.amax()
            begin.record()
            run()
            end.record()
            events[name] = (begin, end)
        return events


class CpuClock:
    """The same for the host shim: its times mean nothing, but everything else is as on a GPU."""

    device = "cpu"
    multiprocessors = 4
    cache_bytes = 0

    def stream(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return 1 << 30

    def finish(self) -> None:
        pass

    def captured(self, run: Run) -> Run:
        return run

    def microseconds(self, runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(2):
            for name, run in runs.items():
                began = time.perf_counter()
                run()
                times[name].append((time.perf_counter() - began) * 1e6)
        return times


Clock = CudaClock | CpuClock


def copy_bandwidth(clock: Clock, most_bytes: int) -> dict[str, float]:
    """A large copy on the device. bytes_per_second: those read and those written."""
    size = min(most_bytes, clock.free_bytes() // 4)
    source = torch.randn(size // 4, device=clock.device)
    target = torch.empty_like(source)
    times = clock.microseconds({"copy": lambda: target.copy_(source), "nothing": lambda: None}, seconds=0.5)
    median = statistics.median(times["copy"])
    return {
        "bytes": 2 * source.nbytes,
        "median_us": median,
        "bytes_per_second": 2 * source.nbytes / median * 1e6,
        "empty_measurement_us": statistics.median(times["nothing"]),
    }
