"""The round written a second time, in plain torch, for lockstep tests: no caches, no engine, no stage of the runtime.

Every round runs the whole text again: the target through transformers' own forward without a cache, the drafter through
its modules with dense attention over everything. Slow, and with no place where a length or a position could go stale.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from pairs import Pair
from torch import Tensor


@dataclass(frozen=True)
class EagerRound:
    anchor: int
    position: int
    drafts: list[int]
    confidences: list[float] | None
    verified: int
    accepted: int
    emitted: list[int]
    target_length: tuple[int, int]


class EagerLoop:
    def __init__(self, pair: Pair):
        from transformers import AutoModelForCausalLM

        from dspark.export.checkpoints import load_checkpoint
        from dspark.export.modules import Drafter

        self.target = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
        checkpoint = load_checkpoint(pair.drafter)
        self.config = checkpoint.config
        self.drafter = Drafter(self.config).eval()
        state = {name: tensor.float() if name != "d2t" else tensor for name, tensor in checkpoint.tensors.items()}
        head = self.target.lm_head.weight
        if "d2t" in state:
            head = head[torch.arange(len(state["d2t"])) + state["d2t"]]
        state |= {"embed_tokens.weight": self.target.model.embed_tokens.weight, "lm_head.weight": head}
        self.drafter.load_state_dict(state)

    @torch.inference_mode()
    def generate(
        self, prompt: Sequence[int], count: int, draft_len: int, threshold: float = 0.0, stops: tuple[int, ...] = ()
    ) -> tuple[list[int], list[EagerRound]]:
        """(new tokens, rounds) for at most `count` new tokens."""
        logits, taps = self.forward(list(prompt))
        tokens = [*prompt, int(logits[-1].argmax())]
        rounds: list[EagerRound] = []
        while len(tokens) < len(prompt) + count and tokens[-1] not in stops:
            position, left = len(tokens) - 1, len(prompt) + count - len(tokens)
            drafts, confidences = ([], None) if left == 1 else self.draft(tokens, taps[:position], draft_len)
            shown = []
            for k, token in enumerate(drafts[: left - 1]):
                if threshold and confidences[k] < threshold:
                    break
                shown.append(token)
                if token in stops:
                    break
            logits, taps = self.forward(tokens + shown)
            says = logits[position:].argmax(-1).tolist()
            wrong = [k for k, draft in enumerate(shown) if draft != says[k]]
            accepted = wrong[0] if wrong else len(shown)
            ended = accepted > 0 and shown[accepted - 1] in stops
            emitted = shown[:accepted] + ([] if ended else [says[accepted]])
            lengths = (position, position + accepted + 1)
            anchor, verified = tokens[-1], len(shown)
            rounds.append(EagerRound(anchor, position, drafts, confidences, verified, accepted, emitted, lengths))
            tokens += emitted
        return tokens[len(prompt) :], rounds

    def forward(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits [T, V] and taps [T, m*H] of all tokens."""
        out = self.target(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        taps = [out.hidden_states[i + 1] for i in self.config.target_layer_ids]
        return out.logits[0], torch.cat(taps, dim=-1)[0]

    def draft(self, tokens: list[int], taps: Tensor, size: int) -> tuple[list[int], list[float] | None]:
        """Drafts and confidences after the last of `tokens`, given the taps of all tokens before it."""
        d, context = self.drafter, len(tokens) - 1
        block = torch.tensor([tokens[-1]] + [self.config.mask_token_id] * (size - 1))
        positions = torch.arange(context, context + size)
        hidden = d.hidden(block, taps, positions, torch.arange(context), self.attend)
        base = d.lm_head(hidden)
        previous, drafts, confidences = torch.tensor([tokens[-1]]), [], []
        state = None if d.markov_head is None else d.markov_head.start(hidden[None])
        for k in range(size):
            row, logits, embedding = hidden[k : k + 1], base[k : k + 1], None
            if d.markov_head is not None:
                embedding = d.markov_head.markov_w1(previous)
                state, e = d.markov_head.step(state, embedding, row)
                logits = logits + d.markov_head.markov_w2(e)
            if d.confidence_head is not None:
                confidences.append(float(torch.sigmoid(d.confidence_head.logit(row, embedding))))
            previous = logits.argmax(-1)
            if d.d2t is not None:
                previous = previous + d.d2t[previous]
            drafts.append(int(previous))
        return drafts, confidences if d.confidence_head is not None else None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
        """Every block row over the context (its last `window` rows) and the whole block. [T, heads, D]"""
        window = self.config.window(layer)
        if window:
            context_k, context_v = context_k[-window:], context_v[-window:]
        group = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(x).repeat_interleave(group, 1) for x in ((context_k, k), (context_v, v)))
        scores = torch.einsum("qhd,khd->hqk", q, keys) / self.config.head_dim**0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
