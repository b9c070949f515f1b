"""What `dspark bench --concurrency` measures: so many requests in flight at once, under several settings, by turns.

A measurement is a closed loop: C requests run, and when one ends the next prompt takes its place. Its window is the
time in which C requests run and none of the first ones still reads its prompt: what comes before (a start with all
prompts at once) and after (fewer than C are left) happens in no service under load, and is not counted. The first C
answers are of different lengths, so that the requests do not go in step with each other. Prompts that are read within
the window are counted: what a newcomer costs the others is a part of serving.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dspark.errors import DSparkError, UsageError
from dspark.runtime import Chunk, Decoder
from dspark.runtime.batch import Batch
from dspark.tools import measure as m

MAX_NEW_TOKENS = 64
THRESHOLD = 0.4
REPEATS = 2
LEAST = 8  # requests of a measurement behind the first C, or C of them, if that is more
OF_THE_BATCH = ("scheduler", "confidence_threshold", "draft_len")  # options of a setting that its requests share
WARM_UP = 4  # tokens of a request that shows whether a setting can be run


@dataclass(frozen=True)
class Job:
    """A request to make."""

    prompt: m.Prompt
    max_new_tokens: int


@dataclass
class Window:
    """What happened while all places were taken. Times are seconds."""

    seconds: float = 0.0
    steps: int = 0  # runs of the target for all requests together,
    decoding_steps: int = 0  # of those, in which a request decoded,
    drafting_steps: int = 0  # and of those, in which tokens were drafted
    prompts: int = 0  # read to their end: each gave its answer's first token
    rounds: int = 0  # of requests: what each took of the steps to decode
    verified: int = 0  # drafts that the target was shown in those rounds,
    accepted: int = 0  # of those, kept
    decoded: int = 0  # tokens that rounds returned
    request_seconds: float = 0.0  # the steps' time, once for each request that decoded in the step
    drafter_failures: int = 0

    @property
    def tokens(self) -> int:
        return self.decoded + self.prompts

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def add(self, chunk: Chunk) -> None:
        done = chunk.round
        if done is None:
            self.prompts += bool(chunk.token_ids)
            return
        self.rounds += 1
        self.verified += done.verified
        self.accepted += done.accepted
        self.decoded += len(done.emitted)
        self.drafter_failures += done.failure is not None


@dataclass(frozen=True)
class Measurement:
    concurrency: int
    setting: m.Setting
    window: Window
    runs: list[m.Run] = field(repr=False)  # in the order in which they ended; those outside of the window too


def make_jobs(prompts: Sequence[m.Prompt], concurrency: int, repeat: int, max_new_tokens: int) -> list[Job]:
    """The requests of a measurement: kinds of prompts in turn, and those of the next repetition go on behind them."""
    mixed = _mixed(prompts)
    count = concurrency + max(LEAST, concurrency)
    chosen = [mixed[(repeat * count + i) % len(mixed)] for i in range(count)]
    # The first ones end one after the other, from the start on: as if each had begun some time before.
    lengths = [-(-max_new_tokens * (i + 1) // concurrency) for i in range(concurrency)]
    lengths += [max_new_tokens] * (count - concurrency)
    return [Job(p, min(max(n, 2), max_new_tokens)) for p, n in zip(chosen, lengths, strict=True)]


def _mixed(prompts: Sequence[m.Prompt]) -> list[m.Prompt]:
    """Sorted by their number within their kind."""
    seen: dict[str, int] = {}
    numbers = []
    for prompt in prompts:
        numbers.append(seen.setdefault(prompt.kind, 0))
        seen[prompt.kind] += 1
    return [prompts[i] for i in sorted(range(len(prompts)), key=lambda i: numbers[i])]


def measure(
    decoder: Decoder,
    prompts: Sequence[m.Prompt],
    concurrencies: Sequence[int],
    settings: Sequence[m.Setting],
    max_new_tokens: int,
    repeats: int,
    progress: Callable[[Measurement], None] = lambda done: None,
) -> list[Measurement]:
    """Every setting at every concurrency, in ascending order. Settings alternate, and who goes first changes, so that a
    slow minute of the machine falls on all of them alike.

    UsageError for a setting that the bundle cannot run, before anything is measured; DSparkError where a request fails.
    """
    places = decoder.target_engine.requests
    if max(concurrencies) > places:
        raise UsageError(f"concurrency {max(concurrencies)}: the engines were loaded for {places} requests at once")
    for setting in settings:
        batch = open_batch(decoder, setting)
        batch.submit(prompts[0].tokens, **_options(setting, min(WARM_UP, max_new_tokens))).result()
    done = []
    for repeat in range(repeats):
        for number, concurrency in enumerate(sorted(concurrencies)):
            jobs = make_jobs(prompts, concurrency, repeat, max_new_tokens)
            for index in range(len(settings)):
                setting = settings[(repeat + number + index) % len(settings)]
                done.append(_run(open_batch(decoder, setting), jobs, concurrency, setting))
                progress(done[-1])
    return done


def open_batch(decoder: Decoder, setting: m.Setting) -> Batch:
    """A batch of its own, whose scheduler knows nothing of earlier ones."""
    options = {name: value for name, value in setting.options.items() if name in OF_THE_BATCH}
    if setting.name == m.PLAIN:
        options["scheduler"] = "off"
    return decoder.batch(**options)


def _options(setting: m.Setting, max_new_tokens: int) -> dict:
    """Of a request. Stop tokens are tokens like others, so that answers are as long as they were asked to be."""
    options = {name: value for name, value in setting.options.items() if name not in OF_THE_BATCH}
    return {**options, "max_new_tokens": max_new_tokens, "ignore_eos": True}


def _run(batch: Batch, jobs: Sequence[Job], concurrency: int, setting: m.Setting) -> Measurement:
    loop = _Loop(batch, jobs, setting)
    window, began = Window(), None
    while loop.fill(concurrency):
        if began is None and not loop.starting:
            began = time.perf_counter()
        decoders = len(loop.decoding)
        chunks = loop.step()
        if began is not None:
            ended = time.perf_counter()
            window.seconds += ended - began
            window.request_seconds += (ended - began) * decoders
            began = ended
            window.steps += 1
            window.decoding_steps += decoders > 0
            window.drafting_steps += any(chunk.round is not None and chunk.round.drafts for chunk in chunks)
            for chunk in chunks:
                window.add(chunk)
    while batch.running:
        loop.step()
    if not window.steps:
        raise DSparkError(
            f"bench: no step ran with {concurrency} requests at once, {setting.name}: answers are too short; raise"
            " --max-new-tokens"
        )
    return Measurement(concurrency, setting, window, loop.runs)


class _Loop:
    """Jobs on a batch, by their numbers."""

    def __init__(self, batch: Batch, jobs: Sequence[Job], setting: m.Setting):
        self.batch, self.setting = batch, setting
        self.runs: list[m.Run] = []  # of those that have ended
        self.starting: set[int] = set()  # of the first ones, those that gave no token yet
        self.decoding: set[int] = set()  # in flight, their prompts read
        self._waiting = deque(enumerate(jobs))
        self._in_flight = 0
        self._chunks: list[Chunk] = []  # of a step

    def fill(self, places: int) -> bool:
        """Submit until so many are in flight; False: fewer are left."""
        first = not self.runs and not self._in_flight
        while self._waiting and self._in_flight < places:
            number, job = self._waiting.popleft()
            deliver, options = partial(self._take, number, job), _options(self.setting, job.max_new_tokens)
            self.batch.submit(job.prompt.tokens, deliver=deliver, **options)
            self._in_flight += 1
            if first:
                self.starting.add(number)
        return self._in_flight == places

    def step(self) -> list[Chunk]:
        """A step of the batch; its chunks. DSparkError where a request failed."""
        self._chunks, known = [], len(self.runs)
        self.batch.step()
        for run in self.runs[known:]:
            answer = run.generation
            if answer.finish_reason not in ("length", "context"):
                why = f"{answer.finish_reason}: {answer.error}" if answer.error else answer.finish_reason
                raise DSparkError(f"bench: {run.prompt.id}, {self.setting.name}: the answer ended by {why}")
        return self._chunks

    def _take(self, number: int, job: Job, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.starting.discard(number)
        self.decoding.add(number)
        if chunk.generation is not None:
            self.decoding.discard(number)
            self._in_flight -= 1
            self.runs.append(m.Run(job.prompt, self.setting, chunk.generation))


def compare(decoder: Decoder, measurements: Iterable[Measurement]) -> list[m.Difference]:
    """Every text that has to be the plain one against it: the longest that plain decoding gave for the prompt, at the
    least concurrency among those. Plain texts of other concurrencies and repetitions are held to it too."""
    measurements = sorted(measurements, key=lambda each: each.concurrency)
    plain: dict[str, m.Run] = {}
    for run in (run for each in measurements if each.setting.name == m.PLAIN for run in each.runs):
        known = plain.get(run.prompt.id)
        if known is None or len(run.generation.token_ids) > len(known.generation.token_ids):
            plain[run.prompt.id] = run
    differences = []
    for each in measurements:
        for run in each.runs if each.setting.comparable else ():
            reference, size = plain[run.prompt.id], len(run.generation.token_ids)
            cut = dataclasses.replace(reference.generation, token_ids=reference.generation.token_ids[:size])
            named = m.Setting(f"{each.setting.name} at {each.concurrency}", run.setting.options)
            pair = [dataclasses.replace(reference, generation=cut), dataclasses.replace(run, setting=named)]
            differences += m.compare(decoder, pair)
    return differences


def report(decoder: Decoder, measurements: Sequence[Measurement]) -> dict:
    """{"points": [figures of a setting at a concurrency], "differences": [...], "warnings": [...]}.

    DSparkError when nothing was drafted: such a run would compare plain decoding with itself.
    """
    drafting = [each.window for each in measurements if each.setting.name != m.PLAIN]
    if not sum(window.drafting_steps for window in drafting):
        raise DSparkError("bench: nothing was drafted, so there is nothing to compare; raise --max-new-tokens")
    warnings = []
    if not sum(window.accepted for window in drafting):
        warnings.append(m.USELESS)
    failures = sum(window.drafter_failures for window in drafting)
    if failures:
        warnings.append(f"the drafter failed in {failures} requests, which went on without drafts: figures are of less")
    differences = compare(decoder, measurements)
    warnings += map(m.described, differences)
    windows: dict[tuple[int, str], list[Window]] = {}
    for each in measurements:
        windows.setdefault((each.concurrency, each.setting.name), []).append(each.window)
    names = dict.fromkeys(sorted((name for _, name in windows), key=lambda name: name != m.PLAIN))
    points = []
    for concurrency in sorted({concurrency for concurrency, _ in windows}):
        for name in names:
            ours, plain = windows[concurrency, name], windows[concurrency, m.PLAIN]
            points.append({"concurrency": concurrency, "setting": name, **_figures(ours, plain)})
    return {"points": points, "differences": [dataclasses.asdict(d) for d in differences], "warnings": warnings}


def _figures(windows: Sequence[Window], plain: Sequence[Window]) -> dict:
    """Sums over the repetitions first, quotients after. plain: of plain decoding, repetition by repetition."""
    total = Window(*(sum(getattr(w, f.name) for w in windows) for f in dataclasses.fields(Window)))
    reference = sum(w.tokens for w in plain) / sum(w.seconds for w in plain)
    ratios = [ours.tokens_per_second / theirs.tokens_per_second for ours, theirs in zip(windows, plain, strict=True)]
    return {
        "seconds": total.seconds,
        "tokens": total.tokens,
        "prompts": total.prompts,
        "steps": total.steps,
        "rounds": total.rounds,
        "tokens_per_second": total.tokens_per_second,
        # The mean over requests, each weighed with the time that it decoded in.
        "tokens_per_second_per_user": total.decoded / total.request_seconds if total.rounds else None,
        "ratio_to_plain": total.tokens_per_second / reference,
        "ratios": ratios,
        "verified_per_round": total.verified / total.rounds if total.rounds else None,
        "tokens_per_round": total.decoded / total.rounds if total.rounds else None,
        "accept_rate": total.accepted / total.verified if total.verified else None,
        "drafting_share": total.drafting_steps / total.decoding_steps if total.decoding_steps else None,
    }


def check(concurrencies: Sequence[int], repeats: int) -> None:
    """UsageError for numbers that cannot be measured."""
    for concurrency in concurrencies:
        if concurrency < 1:
            raise UsageError(f"--concurrency {concurrency}: must be at least 1")
    if len(set(concurrencies)) < len(concurrencies):
        raise UsageError(f"--concurrency {','.join(map(str, concurrencies))}: a number is there twice")
    if repeats < 1:
        raise UsageError(f"--repeats {repeats}: must be at least 1")
