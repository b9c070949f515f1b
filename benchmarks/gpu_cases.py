"""The configurations of gpu_kernels.py as tensors: a kernel's call, the same in torch, and whether the result is right.

What is around valid data is NaN, and outputs begin as NaN (tokens as -1).
"""

import ctypes
from collections.abc import Callable

import accept_kernel
import host_library
import markov_kernel
import ml_dtypes
import torch
import torch.nn.functional as F
from gpu_shapes import AcceptShape, AttentionShape, MarkovShape
from gpu_timing import Clock
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

BF16 = [*host_library.DTYPES].index("bf16")
# Relative (norm of the difference over that of the result): what rounding weights and outputs to bf16 explains.
ATTENTION_ERROR = 1e-2
# Of the largest logit: fp32 sums in another order.
LOGIT_ERROR = 2e-4
# Cached rows up to which SDPA may copy them: 4 GB for keys and as much for values.
MOST_COPIED_ROWS = 1 << 18
# How a contestant is timed: launch by launch, as a CUDA graph.
ALONE, GRAPH = "alone", "graph"
TorchRuns = dict[str, tuple[Callable[[], Tensor], tuple[str, ...]]]
Launch = Callable[[dict[str, Tensor]], None]  # the kernel once, with more tensors


class AttentionCase:
    kernel, outputs, reread_bytes = "block_attention", ("out",), 0
    notes: tuple[str, ...] = ()

    def __init__(self, shape: AttentionShape, clock: Clock):
        self.shape, self.clock = shape, clock
        s, device = shape, clock.device
        self.committed = s.context + s.fresh
        self.end = self.committed + s.block
        rows, capacity = s.requests * s.block, self.end + 24

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=torch.bfloat16, device=device)

        def markers(each: int) -> Tensor:
            return torch.arange(s.requests + 1, dtype=torch.int32, device=device) * each

        caches = {name: draw(s.requests, s.kv_heads, capacity, s.head_size) for name in ("key_cache", "value_cache")}
        for cache in caches.values():
            cache[:, :, s.context :] = torch.nan
        self.tensors = caches | {
            "q": draw(rows, s.heads, s.head_size),
            "k": draw(rows, s.kv_heads, s.head_size),
            "v": draw(rows, s.kv_heads, s.head_size),
            "row_start": markers(s.block),
            "length": torch.full((s.requests,), s.context, dtype=torch.int32, device=device),
            "pages": torch.arange(s.requests, dtype=torch.int32, device=device)[:, None].contiguous(),
            "out": torch.full((rows, s.heads, s.head_size), torch.nan, dtype=torch.bfloat16, device=device),
        }
        if s.fresh:
            self.tensors |= {
                "context_k": draw(s.requests * s.fresh, s.kv_heads, s.head_size),
                "context_v": draw(s.requests * s.fresh, s.kv_heads, s.head_size),
                "context_start": markers(s.fresh),
            }

    def params(self) -> ctypes.Structure:
        s = self.shape
        return host_library.Attention(
            dtype=BF16, rows=s.requests * s.block, context_rows=s.requests * s.fresh, requests=s.requests,
            heads=s.heads, kv_heads=s.kv_heads, head_size=s.head_size, cache_pages=s.requests, request_pages=1,
            page_rows=self.tensors["key_cache"].shape[2], causal=int(s.causal), window=0, scale=s.head_size**-0.5,
            softcap=0.0, target_blocks=min(2 * self.clock.multiprocessors, 384),  # as the plugin has it
        )  # fmt: skip

    def _bias(self, repeat: int = 1) -> Tensor:
        """Additive [repeat * block, end]: 0 or -inf. Its rows begin aligned, which torch's fast kernels want."""
        s = self.shape
        width = (self.end + 15) // 16 * 16
        column = torch.arange(width, device=self.clock.device)
        row = torch.arange(s.block, device=self.clock.device)[:, None]
        seen = column <= self.committed + row if s.causal else column < self.end + 0 * row
        bias = torch.where(seen, 0.0, -torch.inf).to(torch.bfloat16).expand(s.block, width)
        return bias.repeat(repeat, 1)[:, : self.end]

    def torch_runs(self) -> TorchRuns:
        """As anyone would write it; with a group's heads as rows, so that K and V are read once; flash attention."""
        s = self.shape
        group = s.heads // s.kv_heads
        keys, values = (self.tensors[name][:, :, : self.end] for name in ("key_cache", "value_cache"))
        q = self.tensors["q"].view(s.requests, s.block, s.heads, s.head_size).transpose(1, 2)
        rows = q.reshape(s.requests, s.kv_heads, group * s.block, s.head_size)
        bias, row_bias = (self._bias(), self._bias(group)) if s.causal else (None, None)
        runs: TorchRuns = {
            "torch, SDPA": (
                lambda: F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, enable_gqa=True),
                (ALONE, GRAPH),
            ),
            "torch, SDPA, heads as rows": (
                lambda: F.scaled_dot_product_attention(rows, keys, values, attn_mask=row_bias),
                (GRAPH,),
            ),
        }
        if s.causal:
            flash = causal_lower_right(s.block, self.end)
            runs["torch, SDPA, causal_lower_right"] = (
                lambda: F.scaled_dot_product_attention(q, keys, values, attn_mask=flash, enable_gqa=True),
                (GRAPH,),
            )
        if s.causal and s.requests * s.context > MOST_COPIED_ROWS:
            del runs["torch, SDPA"]
            self.notes = ("plain SDPA left out: with a mask it copies keys and values for every query head, in fp32",)
        return runs

    def expected(self) -> Tensor:
        """[T, Hq, D] in fp32, request by request."""
        s = self.shape
        q = self.tensors["q"].view(s.requests, s.block, s.kv_heads, -1, s.head_size).permute(0, 2, 3, 1, 4)
        bias = self._bias(s.heads // s.kv_heads).float()
        made = []
        for request in range(s.requests):
            rows = q[request].reshape(s.kv_heads, -1, s.head_size).float()
            keys, values = (self.tensors[n][request, :, : self.end].float() for n in ("key_cache", "value_cache"))
            weights = torch.softmax(rows @ keys.transpose(1, 2) * s.head_size**-0.5 + bias, dim=-1)
            made.append((weights @ values).reshape(s.heads, s.block, s.head_size).transpose(0, 1))
        return torch.cat(made)

    def compare(self, out: Tensor) -> float:
        """Relative difference from fp32 of torch's [R, heads, rows, D]."""
        s = self.shape
        out = out.reshape(s.requests, s.heads, s.block, s.head_size).transpose(1, 2).reshape(-1, s.heads, s.head_size)
        return self._error(out)

    def _error(self, out: Tensor) -> float:
        return float((out.float() - self._expected).norm() / self._expected.norm())

    def check(self, launch: Launch) -> dict:
        s, t = self.shape, self.tensors
        self._expected = self.expected()
        error = self._error(t["out"])
        appended = True
        for cache, block, fresh in (("key_cache", "k", "context_k"), ("value_cache", "v", "context_v")):
            new = t[block].view(s.requests, s.block, s.kv_heads, s.head_size)
            if s.fresh:
                context = t[fresh].view(s.requests, s.fresh, s.kv_heads, s.head_size)
                new = torch.cat((context, new), dim=1)
            appended &= torch.equal(t[cache][:, :, s.context : self.end], new.transpose(1, 2))
            appended &= bool(t[cache][:, :, self.end :].isnan().all())
        # Not `error > ...`: NaN fails.
        passed = error <= ATTENTION_ERROR and appended
        return {"passed": passed, "relative_error": error, "allowed": ATTENTION_ERROR, "appended": appended}


class MarkovCase:
    kernel, outputs = "markov_argmax", ("tokens", "confidence")
    notes: tuple[str, ...] = ()

    def __init__(self, shape: MarkovShape, clock: Clock):
        self.shape = s = shape
        self.device = clock.device
        self.reread_bytes = s.vocab * s.rank * 2

        def draw(*sizes: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(sizes, device=clock.device) * scale).to(torch.bfloat16)

        self.tensors = {
            "base_logits": draw(s.requests, s.gamma, s.vocab, scale=2.0),
            "anchors": torch.randint(s.vocab, (s.requests,), device=clock.device),
            "hidden": draw(s.requests, s.gamma, s.hidden),
            "w1": draw(s.vocab, s.rank),
            "w2": draw(s.vocab, s.rank, scale=s.rank**-0.5),
            "tokens": torch.full((s.requests, s.gamma), -1, device=clock.device),
            "confidence": torch.full((s.requests, s.gamma), torch.nan, device=clock.device),
        }
        sizes = {"gated": (s.rank, s.hidden + s.rank), "rnn": (3 * s.rank, 2 * s.rank + s.hidden)}
        if s.head in sizes:
            rows, columns = sizes[s.head]
            self.tensors |= {"head_weight": draw(rows, columns, scale=columns**-0.5), "head_bias": draw(rows)}

    def params(self) -> ctypes.Structure:
        s = self.shape
        return markov_kernel.Params(
            dtype=BF16, head=markov_kernel.HEADS.index(s.head), confidence_with_markov=0, requests=s.requests,
            gamma=s.gamma, hidden_size=s.hidden, rank=s.rank, vocab=s.vocab, draft_vocab=s.vocab,
        )  # fmt: skip

    def chain(self, dtype: torch.dtype | None = None, forced: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """(tokens [R, G], the logits of each step), in torch, as eager code has it. forced: tokens to follow instead of
        its own; dtype: of all arithmetic, None: the tensors' own."""
        names = ("base_logits", "hidden", "w1", "w2", "head_weight", "head_bias")
        t = {n: x if dtype is None else x.to(dtype) for n, x in self.tensors.items() if n in names}
        previous, tokens, steps = self.tensors["anchors"], [], []
        state = torch.zeros((self.shape.requests, self.shape.rank), dtype=t["w1"].dtype, device=self.device)
        for k in range(self.shape.gamma):
            e = w = F.embedding(previous, t["w1"])
            if self.shape.head == "gated":
                columns = torch.cat((t["hidden"][:, k], w), dim=-1)
                e = torch.sigmoid(F.linear(columns, t["head_weight"], t["head_bias"])) * w
            elif self.shape.head == "rnn":
                columns = torch.cat((state, w, t["hidden"][:, k]), dim=-1)
                gate, new, out = F.linear(columns, t["head_weight"], t["head_bias"]).chunk(3, dim=-1)
                gate = torch.sigmoid(gate)
                state = gate * state + (1 - gate) * torch.tanh(new)
                e = torch.tanh(out)
            logits = t["base_logits"][:, k] + F.linear(e, t["w2"])
            best = logits.argmax(-1)
            previous = best if forced is None else forced[:, k]
            tokens.append(best)
            if forced is not None:
                steps.append(logits)
        return torch.stack(tokens, dim=1), steps

    def torch_runs(self) -> TorchRuns:
        return {"torch, eager": (lambda: self.chain()[0], (ALONE, GRAPH))}

    def compare(self, tokens: Tensor) -> float:
        """Share of torch's tokens that differ: it rounds logits to bf16, and then has ties."""
        return float((tokens != self.tensors["tokens"]).float().mean())

    def check(self, launch: Launch) -> dict:
        """Each step's logits, and that its token is the best of them, given the tokens before it."""
        s, t = self.shape, self.tensors
        logits = torch.full((s.requests, s.gamma, s.vocab), torch.nan, device=self.device)
        again = torch.full_like(t["tokens"], -1)
        launch({"logits": logits, "tokens": again, "confidence": torch.empty_like(t["confidence"])})
        tokens = t["tokens"]
        inside = bool(((tokens >= 0) & (tokens < s.vocab)).all())
        if not inside:
            return {"passed": False, "tokens_inside_the_vocabulary": False}
        best, steps = self.chain(torch.float32, forced=tokens)
        exact = torch.stack(steps, dim=1)
        allowed = LOGIT_ERROR * float(exact.abs().max())
        error = float((logits - exact).abs().max())
        gap = float((exact.amax(-1) - exact.gather(-1, tokens[..., None])[..., 0]).max())
        same = torch.equal(again, tokens) and bool((t["confidence"] == 1).all())
        return {
            "passed": error <= allowed and gap <= 2 * allowed and same,
            "logits_off_by": error,
            "token_below_the_best_by": gap,
            "allowed": allowed,
            "tokens_that_differ": float((best != tokens).float().mean()),
            "same_without_logits": same,
        }


class AcceptCase:
    kernel, outputs, reread_bytes = "accept", ("accepted", "next"), 0
    notes: tuple[str, ...] = ()

    def __init__(self, shape: AcceptShape, clock: Clock):
        self.shape = s = shape
        device = clock.device
        target = (torch.randn((s.requests, s.gamma + 1, s.vocab), device=device) * 2).to(torch.bfloat16)
        draft = target[:, : s.gamma].float() + torch.randn((s.requests, s.gamma, s.vocab), device=device) * 0.3
        self.tensors = {
            "target_logits": target.view(-1, s.vocab),
            "row_start": torch.arange(s.requests + 1, dtype=torch.int32, device=device) * (s.gamma + 1),
            "accepted": torch.full((s.requests,), -1, dtype=torch.int32, device=device),
            "next": torch.full((s.requests,), -7, device=device),
        }
        if s.drawn:
            gumbel = -torch.log(-torch.log(torch.rand(draft.shape, device=device).clamp(1e-20, 1 - 1e-7)))
            self.tensors |= {
                "drafts": (draft + gumbel).argmax(-1),
                "temperature": torch.ones(s.requests, device=device),
                "draft_logits": draft,
                "draft_temperature": torch.ones(s.requests, device=device),
                "accept_uniform": torch.rand((s.requests, s.gamma), device=device),
                "final_uniform": torch.rand(s.requests, device=device),
            }
        else:  # request r keeps r drafts, as far as there are so many; of equal logits the first is the best
            place = torch.arange(s.vocab, device=device)
            rows = target[:, : s.gamma]
            drafts = torch.where(rows == rows.amax(-1, keepdim=True), place, s.vocab).amin(-1)
            for request in range(s.requests):
                drafts[request, request % (s.gamma + 1) :] += 1
            self.tensors["drafts"] = drafts % s.vocab

    def params(self) -> ctypes.Structure:
        s = self.shape
        return accept_kernel.Params(
            dtype=BF16, rows=s.requests * (s.gamma + 1), requests=s.requests, gamma=s.gamma, vocab=s.vocab,
            draft_vocab=s.vocab if s.drawn else 0,
        )  # fmt: skip

    def torch_runs(self) -> TorchRuns:
        return {"torch, eager": (self._drawn if self.shape.drawn else self._greedy, (ALONE, GRAPH))}

    def _rows(self) -> Tensor:
        return self.tensors["target_logits"].view(self.shape.requests, self.shape.gamma + 1, self.shape.vocab)

    def _greedy(self) -> Tensor:
        best = self._rows().argmax(-1)
        accepted = (best[:, :-1] == self.tensors["drafts"]).int().cumprod(1).sum(1)
        return torch.stack((accepted, best.gather(1, accepted[:, None])[:, 0]), dim=1)

    def _drawn(self) -> Tensor:
        t, gamma = self.tensors, self.shape.gamma
        drafts = t["drafts"][..., None]
        p = torch.softmax(self._rows().float() / t["temperature"][:, None, None], dim=-1)
        q = torch.softmax(t["draft_logits"] / t["draft_temperature"][:, None, None], dim=-1)
        kept = t["accept_uniform"] * q.gather(-1, drafts)[..., 0] < p[:, :gamma].gather(-1, drafts)[..., 0]
        accepted = kept.int().cumprod(1).sum(1)

        def row(of: Tensor, at: Tensor) -> Tensor:
            return of.gather(1, at[:, None, None].expand(-1, 1, of.shape[-1]))[:, 0]

        weights = row(p, accepted) - row(q, accepted.clamp(max=gamma - 1)) * (accepted < gamma)[:, None]
        sums = weights.clamp(min=0).cumsum(-1)
        token = torch.searchsorted(sums, t["final_uniform"][:, None] * sums[:, -1:], right=True)[:, 0]
        return torch.stack((accepted, token), dim=1)

    def compare(self, found: Tensor) -> float:
        """Share of torch's accepted counts that differ: its argmax may take another one of equal logits."""
        return float((found[:, 0] != self.tensors["accepted"]).float().mean())

    def check(self, launch: Launch) -> dict:
        """Against the float64 loop of the kernel's own tests."""
        arrays = {}
        for name, tensor in self.tensors.items():
            if name not in self.outputs:
                short = tensor.dtype == torch.bfloat16
                array = (tensor.view(torch.int16) if short else tensor).cpu().numpy()
                arrays[name] = array.view(ml_dtypes.bfloat16) if short else array
        found = self.tensors["accepted"].cpu().numpy(), self.tensors["next"].cpu().numpy()
        counts = accept_kernel.Compared()
        try:
            accept_kernel.check(arrays, found, counts)
        except AssertionError as error:
            return {"passed": False, "why": str(error)}
        return {"passed": True, "requests": counts.requests, "undecided": counts.skipped}


CASES = {case.kernel: case for case in (MarkovCase, AttentionCase, AcceptCase)}
Case = MarkovCase | AttentionCase | AcceptCase
