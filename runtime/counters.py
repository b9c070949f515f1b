"""What a batch has done since it began, for monitoring; `dspark.runtime.prometheus` shows it to Prometheus."""

from dataclasses import dataclass, field

from dspark.runtime.loop import Round
from dspark.runtime.request import Generation


@dataclass
class Counters:
    """Only ever rising. A draft is what one request drafted in one round."""

    drafts: int = 0  # rounds of requests in which tokens were drafted
    proposed_tokens: int = 0  # that the drafter gave in those rounds
    draft_tokens: int = 0  # of those, verified by the target
    accepted_tokens: int = 0  # of those, kept
    verified_per_position: list[int] = field(default_factory=list)  # [k]: drafts whose token k was verified,
    accepted_per_position: list[int] = field(default_factory=list)  # and of those, whose token k was accepted
    steps: int = 0  # runs of the target for all requests together
    rounds: int = 0  # of requests: what each took of those steps to decode
    prompt_tokens: int = 0  # read
    generated_tokens: int = 0  # returned
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests
    drafter_failures: int = 0  # requests that went on without drafts, since the drafter crashed or gave NaN

    def count(self, done: Round) -> None:
        """A round of one request."""
        self.rounds += 1
        if not done.drafts:
            return
        self.drafts += 1
        self.proposed_tokens += len(done.drafts)
        self.draft_tokens += done.verified
        self.accepted_tokens += done.accepted
        missing = len(done.drafts) - len(self.verified_per_position)
        for counts, reached in (
            (self.verified_per_position, done.verified),
            (self.accepted_per_position, done.accepted),
        ):
            counts += [0] * missing
            for k in range(reached):
                counts[k] += 1

    def ended(self, generation: Generation) -> None:
        self.finished[generation.finish_reason] = self.finished.get(generation.finish_reason, 0) + 1
