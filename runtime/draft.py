"""Stage 1, draft: the target's hidden states of the committed tokens in, gamma draft tokens and confidences out.

`Drafter` needs no other part of the runtime: a service that runs its target elsewhere keeps one per request, hands it
the taps of the tokens it committed, and asks for drafts after the last of them.
"""

from dataclasses import dataclass

import numpy as np

from dspark.errors import UsageError
from dspark.manifest import Drafter as Spec
from dspark.runtime.engines.base import NOISE, Engine, Rows, join_rows
from dspark.runtime.target import PAGES


@dataclass(frozen=True)
class Draft:
    """G draft tokens for the positions after the anchor."""

    tokens: list[int]
    confidence: np.ndarray | None  # fp32 [G]: the chance that token k is accepted if all before it are; None: not read
    # fp32 [G, Vd], before temperature and noise: token k was drawn from softmax(logits[k] / temperature), over draft
    # indices. Valid until the drafter's next run. None: not read.
    logits: np.ndarray | None = None


class Drafter:
    """The drafter for one request.

    Its context is one row per committed token, at that token's position. `length` rows are in the engine's cache;
    `observe` queues further ones, which enter the cache with the next proposal. The block's own rows never stay. An
    engine has room for one request: a second drafter on it takes its cache, and the first one is told so.
    """

    def __init__(self, engine: Engine, spec: Spec, limit: int, chunk: int = 512):
        """limit: the largest context in rows. chunk: how many queued rows make a run of their own (bounds memory)."""
        self.engine = engine
        self.spec = spec
        self.limit = limit
        self.chunk = chunk
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
        """Take the taps fp32 [n, m*H] of the n tokens committed since the last call, in order. They are copied."""
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
        temperature or noise, and for a bundle that cannot draw.
        """
        size = self.spec.block_size if draft_len is None else draft_len
        if not 1 <= size <= self.spec.block_size:
            raise UsageError(f"draft length {size}: this drafter takes 1 to {self.spec.block_size}")
        self._check_noise(size, temperature, noise)
        if taps is not None:
            self.observe(taps)
        context = self._take()
        if not len(context):
            raise UsageError("drafter: no new committed tokens; a proposal needs the taps of at least one")
        # More rows than a chunk can only come from one large hand-over.
        while len(context) > self.chunk:
            self._extend(context[: self.chunk])
            context = context[self.chunk :]
        with_confidence = read_confidence and self.spec.confidence.enabled
        wanted = {"draft_tokens": True, "confidence": with_confidence, "draft_logits": read_logits}
        fetch = tuple(name for name, is_wanted in wanted.items() if is_wanted)
        block = [anchor] + [self.spec.mask_token_id] * (size - 1)
        outputs = self._run(block, context, fetch, temperature, noise)
        confidence = outputs["confidence"][0].copy() if with_confidence else None
        logits = outputs["draft_logits"][0] if read_logits else None
        return Draft(outputs["draft_tokens"][0].tolist(), confidence, logits)

    def _check_noise(self, size: int, temperature: float, noise: np.ndarray | None) -> None:
        if not 0 <= temperature < np.inf:
            raise UsageError(f"drafter: temperature {temperature}: must be a number from 0")
        if (noise is None) != (temperature == 0):
            raise UsageError("drafter: noise is for a temperature above 0: give both, or neither")
        if noise is None:
            return
        if NOISE not in self.engine.inputs:
            raise UsageError("drafter: this bundle was exported without noise, so drafts are greedy; export it again")
        shape = (size, self.spec.draft_vocab_size)
        if noise.dtype != np.float32 or noise.shape != shape:
            raise UsageError(f"drafter: noise {noise.dtype} {list(noise.shape)}; give float32 {list(shape)}")

    def _take(self) -> Rows:
        waiting, self._waiting = self._waiting, []
        return join_rows(waiting) if waiting else np.empty((0, 0), np.float32)

    def _extend(self, context: Rows) -> None:
        """Add context rows without wanting drafts: the graph needs a block, so it gets the smallest."""
        for at in range(0, len(context), self.chunk):
            self._run([self.spec.mask_token_id], context[at : at + self.chunk], ())

    def _run(
        self,
        block: list[int],
        context: Rows,
        fetch: tuple[str, ...],
        temperature: float = 0.0,
        noise: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """One engine run: context rows take the positions after the cached ones, block rows those after them."""
        size, rows, anchor_position = len(block), len(context), self.length + len(context)
        if self.engine.owner is not self:
            if self.length:
                raise UsageError(
                    "drafter: another one used this engine's cache since; reset() and observe all taps again"
                )
            self.engine.owner = self
        outputs = self.engine.run(
            {
                "tokens": np.array([block], np.int64),
                "positions": np.arange(anchor_position, anchor_position + size)[None],
                "taps": context,
                "context_positions": np.arange(self.length, anchor_position),
                "row_start": np.array([0, size], np.int32),
                "context_start": np.array([0, rows], np.int32),
                "length": np.array([self.length], np.int32),
                "pages": PAGES,
                "temperature": np.array([temperature], np.float32),
            }
            | ({} if noise is None else {NOISE: noise[None]}),
            fetch,
        )
        self.length = anchor_position
        return outputs
