"""Statistics of a generation, each with its denominator. `to_json` is what `dspark generate --json` prints."""

from dataclasses import dataclass, field

from dspark.runtime.loop import Round


@dataclass
class Stats:
    """Counts of one generation. A round is one target forward after the prefill, plain decoding's steps included.

    emitted = 1 + accepted + rounds - ended_rounds, and direct_full_commits + direct_partial_commits + replay_fallbacks
    = rounds. Only what was verified and kept is counted as accepted; drafts cut before verify count as drafted only.
    """

    rounds: int = 0
    drafted: int = 0  # tokens that the drafter proposed
    verified: int = 0  # of those, shown to the target: the denominator of the accept rate
    accepted: int = 0  # of those, kept
    emitted: int = 0  # tokens returned, the prefill's first one and an accepted or drawn stop token included
    ended_rounds: int = 0  # rounds without their extra token: an accepted stop token ended the text
    accepted_per_position: list[int] = field(default_factory=list)  # [k]: rounds in which draft k was accepted,
    verified_per_position: list[int] = field(default_factory=list)  # out of this many in which it was verified
    direct_full_commits: int = 0  # rounds that kept every row they verified
    direct_partial_commits: int = 0  # rounds that kept a prefix of them
    replay_fallbacks: int = 0  # rounds that ran accepted tokens one by one: mode strict, or a state with no other way
    target_steps: int = 0  # target forwards after the prefill: one a round, but for replays
    pauses: int = 0  # how often drafting was paused
    paused_rounds: int = 0  # rounds of those pauses
    drafter_failures: int = 0  # 1: the drafter crashed or gave NaN, and the rest was decoded plainly
    prefill_ms: float = 0.0
    draft_ms: float = 0.0  # sum over rounds
    verify_ms: float = 0.0  # sum over rounds
    engine_ms: float = 0.0  # inside engine runs of rounds
    total_ms: float = 0.0  # wall time, prefill included, without the time that a stream's reader took

    def add(self, done: Round, draft_len: int) -> None:
        """Count a round. draft_len: the length of the per-position lists."""
        if not self.verified_per_position:
            self.accepted_per_position = [0] * draft_len
            self.verified_per_position = [0] * draft_len
        self.rounds += 1
        self.drafted += len(done.drafts)
        self.verified += done.verified
        self.accepted += done.accepted
        self.ended_rounds += len(done.emitted) == done.accepted
        for k in range(done.verified):
            self.verified_per_position[k] += 1
        for k in range(done.accepted):
            self.accepted_per_position[k] += 1
        self.direct_full_commits += done.commit == "full"
        self.direct_partial_commits += done.commit == "partial"
        self.replay_fallbacks += done.commit == "replay"
        self.target_steps += done.target_steps
        self.draft_ms += done.draft_ms
        self.verify_ms += done.verify_ms
        self.engine_ms += done.engine_ms

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round (the paper's tau): the prefill's token left out; None without a round."""
        return (self.emitted - 1) / self.rounds if self.rounds else None

    @property
    def net_saved(self) -> int:
        """Target forwards saved: plain decoding makes one for every token but the prefill's."""
        return max(0, self.emitted - 1) - self.target_steps

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the whole wall time, prefill included."""
        return self.emitted / self.total_ms * 1e3 if self.total_ms else 0.0

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The same without the prefill and its token; None without a round."""
        return (self.emitted - 1) / self.decode_ms * 1e3 if self.rounds else None

    @property
    def decode_ms(self) -> float:
        """Wall time after the prefill: the rounds, and turning their tokens into text."""
        return self.total_ms - self.prefill_ms

    @property
    def outside_share(self) -> float | None:
        """The share of decode_ms spent outside engine runs; None without a round."""
        return 1 - self.engine_ms / self.decode_ms if self.rounds else None

    def to_json(self) -> dict:
        """The `stats` object of `dspark generate --json`."""
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "emitted": self.emitted,
            "ended_rounds": self.ended_rounds,
            "acceptance_length": self.acceptance_length,
            "accepted_per_position": self.accepted_per_position,
            "verified_per_position": self.verified_per_position,
            "direct_full_commits": self.direct_full_commits,
            "direct_partial_commits": self.direct_partial_commits,
            "replay_fallbacks": self.replay_fallbacks,
            "target_steps": self.target_steps,
            "net_saved": self.net_saved,
            "pauses": self.pauses,
            "paused_rounds": self.paused_rounds,
            "drafter_failures": self.drafter_failures,
            "prefill_ms": round(self.prefill_ms, 3),
            "draft_ms": round(self.draft_ms, 3),
            "verify_ms": round(self.verify_ms, 3),
            "engine_ms": round(self.engine_ms, 3),
            "total_ms": round(self.total_ms, 3),
            "tokens_per_second": round(self.tokens_per_second, 3),
        }
