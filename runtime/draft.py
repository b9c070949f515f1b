"""Stage 1, draft: the target's hidden states of the committed tokens in, gamma draft tokens and confidences out.

`Drafter` needs no other part of the runtime: a service that runs its target elsewhere keeps one per request, hands it
the taps of the tokens it committed, and asks for drafts after the last of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dspark.errors import DSparkError, UsageError
from dspark.manifest import Drafter as Spec
from dspark.runtime.engines.base import NOISE, Engine, Rows, join_rows


class DraftError(DSparkError):
    """A drafter's engine failed, or gave what no drafter gives. Its context is void; the target needs no drafts."""


@dataclass(frozen=True)
class Draft:
    """G draft tokens for the positions after the anchor."""

    tokens: list[int]
    confidence: np.ndarray | None  # fp32 [G]: the chance that token k is accepted if all before it are; None: not read
    # fp32 [G, Vd], before temperature and noise: token k was drawn from softmax(logits[k] / temperature), over draft
    # indices. Valid until the drafter's next run. None: not read.
    logits: np.ndarray | None = None

    @cached_property
    def sound(self) -> int:
        """How many of the drafts, from the first, come with all the numbers that a drafter gives.

        The others are not to be verified. Whether draft k is sound hangs on the drafts before it, never on itself, so
        no draft may be left out for what is wrong behind it: that would change the distribution of `exact`.
        """
        broken = np.array(self.tokens) < 0
        if self.confidence is not None:
            broken |= np.isnan(self.confidence)
        if self.logits is not None:
            broken |= np.isnan(self.logits.max(axis=1))  # which is no number where one of them is none
        return int(broken.argmax()) if broken.any() else len(self.tokens)


class Drafter:
    """The drafter for one request.

    Its context is one row per committed token, at that token's position. `length` rows are in the engine's cache;
    `observe` queues further ones, which enter the cache with the next proposal. The block's own rows never stay. A
    place in an engine is for one request: a second drafter there takes its cache, and the first one is told so.
    """

    def __init__(self, engine: Engine, spec: Spec, limit: int, chunk: int = 512, place: int = 0):
        """limit: the largest context in rows. chunk: how many queued rows make a run of their own (bounds memory).
        place: in the engine."""
        self.engine = engine
        self.spec = spec
        self.limit = limit
        self.chunk = chunk
        self.place = place
        self.length = 0
        self._waiting: list[Rows] = []

    @property
    def observed(self) -> int:
        """Committed tokens whose taps were handed over; the next anchor has this position."""
        return self.length + sum(map(len, self._waiting))

    def reset(self) -> None:
        """Forget the whole context."""
        self.length = 0
        self._waiting = []

    def truncate(self, rows: int) -> None:
        """Keep only the first `rows` context rows."""
        waiting = self._take()[: max(0, rows - self.length)]
        self._waiting = [waiting] if len(waiting) else []
        self.length = min(self.length, rows)

    def observe(self, taps: Rows) -> None:
        """Take the taps fp32 [n, m*H] of the n tokens committed since the last call, in order. They are copied.

        UsageError for other arrays, and for more rows than the context holds; DraftError where the engine fails.
        """
        if taps.ndim != 2 or taps.dtype != np.float32:
            raise UsageError(
                f"drafter: taps {taps.dtype} {list(taps.shape)}; give float32 [tokens, taps * hidden size]"
            )
        width = self.engine.inputs["taps"].shape[-1]
        if taps.shape[1] != width:
            count = len(self.spec.target_layer_ids)
            raise UsageError(f"drafter: taps {list(taps.shape)}; a row has {width} numbers, those of {count} layers")
        if self.observed + len(taps) > self.limit:
            raise UsageError(f"drafter: the context is full ({self.limit} tokens); start a new request")
        if self._waiting and sum(map(len, self._waiting)) + len(taps) > self.chunk:
            self._extend(self._take())
        self._waiting.append(taps.copy())

    def propose(
        self,
        anchor: int,
        taps: Rows | None = None,
        draft_len: int | None = None,
        *,
        temperature: float = 0.0,
        noise: np.ndarray | None = None,
        read_confidence: bool = True,
        read_logits: bool = False,
    ) -> Draft:
        """Draft the `draft_len` (1..block_size, default block_size) tokens that follow `anchor`.

        anchor: the last committed token, whose hidden state nobody has computed yet. taps: as for `observe`, if any are
        still to be handed over; at least one token must have been since the last proposal.
        temperature, noise: above 0, token k is drawn: the argmax of logits / temperature + noise, with the caller's
        Gumbel noise fp32 [draft_len, Vd]. At 0 it is the logits' argmax, and there is no noise.
        read_confidence=False and read_logits=False leave those in the engine. UsageError for a wrong draft_len,
        temperature or noise, and for a bundle that cannot draw. DraftError where the engine fails.
        """
        drawn = Drawing(temperature, noise, read_logits)
        _check(self, draft_len, [drawn])
        if taps is not None:
            self.observe(taps)
        return propose_all([self], [anchor], draft_len, [drawn], read_confidence=read_confidence)[0]

    def _take(self) -> Rows:
        waiting, self._waiting = self._waiting, []
        return join_rows(waiting) if waiting else np.empty((0, 0), np.float32)

    def _extend(self, context: Rows) -> None:
        """Add context rows without wanting drafts: the graph needs a block, so it gets the smallest."""
        for at in range(0, len(context), self.chunk):
            _run([self], [[self.spec.mask_token_id]], [context[at : at + self.chunk]], [Drawing()], ())

    def _next_context(self) -> Rows:
        """The queued rows that the next proposal brings; UsageError where there are none."""
        context = self._take()
        if not len(context):
            raise UsageError("drafter: no new committed tokens; a proposal needs the taps of at least one")
        # More rows than a chunk can only come from one large hand-over.
        while len(context) > self.chunk:
            self._extend(context[: self.chunk])
            context = context[self.chunk :]
        return context


UNSOUND = "drafter: it gave numbers that are none (NaN)"


@dataclass(frozen=True)
class Drawing:
    """How a request's drafts are drawn; see `Drafter.propose`."""

    temperature: float = 0.0
    noise: np.ndarray | None = None
    read_logits: bool = False

    def check(self, engine: Engine, spec: Spec, size: int) -> None:
        if not 0 <= self.temperature < np.inf:
            raise UsageError(f"drafter: temperature {self.temperature}: must be a number from 0")
        if (self.noise is None) != (self.temperature == 0):
            raise UsageError("drafter: noise is for a temperature above 0: give both, or neither")
        if self.noise is None:
            return
        if NOISE not in engine.inputs:
            raise UsageError("drafter: this bundle was exported without noise, so drafts are greedy; export it again")
        shape = (size, spec.draft_vocab_size)
        if self.noise.dtype != np.float32 or self.noise.shape != shape:
            raise UsageError(f"drafter: noise {self.noise.dtype} {list(self.noise.shape)}; give float32 {list(shape)}")


def propose_all(
    drafters: Sequence[Drafter],
    anchors: Sequence[int],
    draft_len: int | None,
    drawings: Sequence[Drawing],
    *,
    read_confidence: bool = True,
) -> list[Draft]:
    """`Drafter.propose` of all requests in one run."""
    spec, size = drafters[0].spec, _check(drafters[0], draft_len, drawings)
    contexts = [drafter._next_context() for drafter in drafters]
    with_confidence = read_confidence and spec.confidence.enabled
    with_logits = any(drawing.read_logits for drawing in drawings)
    wanted = {"draft_tokens": True, "confidence": with_confidence, "draft_logits": with_logits}
    fetch = tuple(name for name, is_wanted in wanted.items() if is_wanted)
    blocks = [[anchor] + [spec.mask_token_id] * (size - 1) for anchor in anchors]
    outputs = _run(drafters, blocks, contexts, drawings, fetch)
    return [
        Draft(
            outputs["draft_tokens"][i].tolist(),
            outputs["confidence"][i].copy() if with_confidence else None,
            outputs["draft_logits"][i] if drawing.read_logits else None,
        )
        for i, drawing in enumerate(drawings)
    ]


def _check(drafter: Drafter, draft_len: int | None, drawings: Sequence[Drawing]) -> int:
    """The draft length, where everything fits the drafter."""
    size = drafter.spec.block_size if draft_len is None else draft_len
    if not 1 <= size <= drafter.spec.block_size:
        raise UsageError(f"draft length {size}: this drafter takes 1 to {drafter.spec.block_size}")
    for drawing in drawings:
        drawing.check(drafter.engine, drafter.spec, size)
    return size


def _run(
    drafters: Sequence[Drafter],
    blocks: Sequence[Sequence[int]],
    contexts: Sequence[Rows],
    drawings: Sequence[Drawing],
    fetch: tuple[str, ...],
) -> dict[str, np.ndarray]:
    """One engine run: of each request, context rows take the positions after the cached ones, block rows those after
    them. Blocks are of one length."""
    engine, size = drafters[0].engine, len(blocks[0])
    for drafter in drafters:
        if engine.owners.get(drafter.place) is not drafter:
            if drafter.length:
                raise UsageError(
                    "drafter: another one used this engine's cache since; reset() and observe all taps again"
                )
            engine.owners[drafter.place] = drafter
    lengths, counts = [drafter.length for drafter in drafters], [len(context) for context in contexts]
    anchor_at = np.add(lengths, counts)
    inputs = {
        "tokens": np.array(blocks, np.int64),
        "positions": anchor_at[:, None] + np.arange(size),
        "taps": join_rows(contexts),
        "context_positions": np.concatenate([np.arange(n, end) for n, end in zip(lengths, anchor_at, strict=True)]),
        "row_start": np.arange(len(drafters) + 1, dtype=np.int32) * np.int32(size),
        "context_start": np.cumsum([0, *counts]).astype(np.int32),
        "length": np.array(lengths, np.int32),
        "pages": np.array([[drafter.place] for drafter in drafters], np.int32),
        "temperature": np.array([drawing.temperature for drawing in drawings], np.float32),
    }
    if any(drawing.noise is not None for drawing in drawings):
        inputs[NOISE] = _noise(drawings)
    try:
        outputs = engine.run(inputs, fetch)
    except (UsageError, AssertionError):  # the caller's fault, or ours
        raise
    except Exception as error:  # a backend has its own kinds
        raise DraftError(f"drafter: {str(error) or type(error).__name__}") from error
    for drafter, end in zip(drafters, anchor_at.tolist(), strict=True):
        drafter.length = end
    return outputs


def _noise(drawings: Sequence[Drawing]) -> np.ndarray:
    """[R, G, Vd]; that of greedy requests is never read."""
    first = next(drawing.noise for drawing in drawings if drawing.noise is not None)
    noise = np.empty((len(drawings), *first.shape), np.float32)
    for row, drawing in zip(noise, drawings, strict=True):
        if drawing.noise is not None:
            row[:] = drawing.noise
    return noise
