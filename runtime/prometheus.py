"""A batch's counters for Prometheus, by the library prometheus_client: `REGISTRY.register(Collector(batch))`.

Names are those that vLLM's users know, with `dspark_` in the place of `vllm:`. What each counts, and which one is
divided by which, is in docs/metrics.md.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dspark.errors import DSparkError
from dspark.runtime.batch import Batch

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

MISSING = "the package prometheus_client is missing; install it with: pip install '.[metrics]'"

# Name without `dspark_` and, of counters, `_total`: the field of Counters that it shows, and its help text.
COUNTERS = {
    "spec_decode_num_drafts": ("drafts", "Rounds of requests in which tokens were drafted, verified or not"),
    "spec_decode_num_proposed_tokens": ("proposed_tokens", "Tokens that the drafter gave, verified or not"),
    "spec_decode_num_draft_tokens": (
        "draft_tokens",
        "Drafted tokens that the target verified; those that the scheduler or a limit cut before are not among them",
    ),
    "spec_decode_num_accepted_tokens": (
        "accepted_tokens",
        "Verified draft tokens that were accepted; the target's own extra token of a round is not among them",
    ),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that the target has read"),
    "generation_tokens": ("generated_tokens", "Tokens returned, the first one of each answer included"),
    "drafter_failures": ("drafter_failures", "Requests that went on without drafts because the drafter failed"),
    "steps": ("steps", "Steps: runs of the target for all requests together, those that only read prompts included"),
    "rounds": ("rounds", "Rounds of requests: each request that decodes in a step has one, drafted or not"),
}
PER_POSITION = {
    "spec_decode_num_draft_tokens_per_pos": (
        "verified_per_position",
        "Rounds in which the draft token at the position, from 0, was verified",
    ),
    "spec_decode_num_accepted_tokens_per_pos": (
        "accepted_per_position",
        "Rounds in which the draft token at the position, from 0, was accepted, and so all before it",
    ),
}
FINISHED = ("request_success", "Requests that have ended, by finish reason: all of them, failed ones included")
GAUGES = {
    "num_requests_running": ("running", "Requests that have a place in the engines"),
    "num_requests_waiting": ("waiting", "Requests that wait for a place"),
}


class Collector:
    """A prometheus_client collector: register it, or render it alone with a CollectorRegistry of its own.

    Values are read when they are asked for, from any thread, and never under the batch's locks: a reading may fall
    within a step, between two counters of it.
    """

    def __init__(self, batch: Batch):
        """DSparkError where the package prometheus_client is not installed."""
        try:
            from prometheus_client import metrics_core
        except ImportError as error:
            raise DSparkError(MISSING) from error
        self.batch = batch
        self._metrics = metrics_core

    def describe(self) -> Iterator["Metric"]:
        """The names, by which a registry refuses a second batch beside this one."""
        return self.collect()

    def collect(self) -> Iterator["Metric"]:
        counters, counter = self.batch.counters, self._metrics.CounterMetricFamily
        for name, (field, text) in COUNTERS.items():
            yield counter(f"dspark_{name}", text, value=getattr(counters, field))
        for name, (field, text) in PER_POSITION.items():
            family = counter(f"dspark_{name}", text, labels=["position"])
            for position, value in enumerate([*getattr(counters, field)]):
                family.add_metric([str(position)], value)
            yield family
        finished = counter(f"dspark_{FINISHED[0]}", FINISHED[1], labels=["finished_reason"])
        for reason, value in {**counters.finished}.items():
            finished.add_metric([reason], value)
        yield finished
        for name, (field, text) in GAUGES.items():
            yield self._metrics.GaugeMetricFamily(f"dspark_{name}", text, value=getattr(self.batch, field))
