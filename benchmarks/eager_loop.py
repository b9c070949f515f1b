"""The same greedy speculative loop in eager torch, side by side with the bundle's runtime, in one run.

    python benchmarks/eager_loop.py --bundle engines/demo --ckpt demo --limit 5

The eager loop is written with the tools that people have without this project: transformers' own model with its
DynamicCache (cropped after every round) and the drafter's torch modules with cached context keys and values. Prompts
alternate between the two, both use the same number of threads, and the texts are compared.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

from dspark.export.checkpoints import load_checkpoint
from dspark.export.demo import demo_drafter, demo_target
from dspark.export.locate import locate
from dspark.export.modules import Drafter
from dspark.export.pair import assemble
from dspark.export.target import load_target
from dspark.runtime import load


class EagerDrafter:
    """The drafter's modules with a context cache of plain tensors [Tc, Hkv, D] per layer."""

    def __init__(self, drafter: Drafter):
        self.drafter = drafter
        self.keys: list[Tensor | None] = [None] * len(drafter.layers)
        self.values: list[Tensor | None] = [None] * len(drafter.layers)

    def propose(self, anchor: int, taps: Tensor, start: int) -> list[int]:
        """taps [n, m*H] of the newly committed tokens at positions start..start+n-1 -> gamma draft tokens."""
        d, gamma = self.drafter, self.drafter.config.block_size
        positions = torch.arange(start, start + len(taps))
        block = torch.arange(start + len(taps), start + len(taps) + gamma)
        tokens = torch.full((gamma,), d.config.mask_token_id)
        tokens[0] = anchor

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, context_k: Tensor, context_v: Tensor) -> Tensor:
            old_k, old_v = self.keys[layer], self.values[layer]
            context_k = context_k if old_k is None else torch.cat((old_k, context_k))
            context_v = context_v if old_v is None else torch.cat((old_v, context_v))
            self.keys[layer], self.values[layer] = context_k, context_v
            window = d.config.window(layer)
            keys, values = torch.cat((context_k[-window:], k)), torch.cat((context_v[-window:], v))
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], enable_gqa=True
            )
            return out[0].transpose(0, 1)

        hidden = d.hidden(tokens, taps, block, positions, attend)
        base = d.lm_head(hidden)
        previous, drafts = torch.tensor([anchor]), []
        state = d.markov_head.start(hidden[None]) if d.markov_head is not None else None
        for k in range(gamma):
            logits = base[k : k + 1]
            if d.markov_head is not None:
                state, e = d.markov_head.step(state, d.markov_head.markov_w1(previous), hidden[k : k + 1])
                logits = logits + d.markov_head.markov_w2(e)
            previous = logits.argmax(-1)
            if d.d2t is not None:
                previous = previous + d.d2t[previous]
            drafts.append(int(previous))
        return drafts


@torch.inference_mode()
def generate(
    model, drafter: Drafter, taps: tuple[int, ...], prompt: list[int], limit: int, stops: set[int]
) -> list[int]:
    """Greedy draft -> verify -> commit; every round verifies the full block."""
    from transformers import DynamicCache

    cache, eager = DynamicCache(config=model.config), EagerDrafter(drafter)

    def forward(tokens: list[int]) -> tuple[Tensor, Tensor]:
        out = model(torch.tensor([tokens]), past_key_values=cache, output_hidden_states=True, use_cache=True)
        return out.logits[0].argmax(-1), torch.cat([out.hidden_states[i + 1][0] for i in taps], dim=-1)

    best, states = forward(prompt)
    emitted, start = [int(best[-1])], 0
    while len(emitted) < limit and emitted[-1] not in stops:
        drafts = eager.propose(emitted[-1], states, start)[: limit - len(emitted) - 1]
        start += len(states)
        best, states = forward([emitted[-1], *drafts])
        n = 0
        while n < len(drafts) and drafts[n] == int(best[n]):
            n += 1
        states = states[: n + 1]
        if n < len(drafts):
            cache.crop(n - len(drafts))
        for token in [*drafts[:n], int(best[n])]:
            emitted.append(token)
            if token in stops:
                return emitted
    return emitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--ckpt", default="demo", help="the drafter that the bundle was exported from")
    parser.add_argument("--target", help="its target (not for the demo)")
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent.parent / "demo/prompts/heldout.jsonl")
    parser.add_argument("--kind", default="code")
    parser.add_argument("--limit", type=int, default=5, help="prompts")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    checkpoint = load_checkpoint(demo_drafter() if args.ckpt == "demo" else locate(args.ckpt, "--ckpt"))
    target = load_target(str(demo_target()) if args.ckpt == "demo" else args.target)
    target.model.set_attn_implementation("sdpa")
    drafter = assemble(checkpoint, target)
    decoder = load(args.bundle, threads=args.threads)

    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [row["prompt"] for row in rows if row["kind"] == args.kind][: args.limit]
    seconds, tokens, differ = {"eager": 0.0, "runtime": 0.0}, {"eager": 0, "runtime": 0}, 0
    for number, prompt in enumerate(prompts):
        ids = decoder.encode([{"role": "user", "content": prompt}])
        if number == 0:  # warm both up
            decoder.generate(ids, max_new_tokens=8)
            generate(target.model, drafter, checkpoint.config.target_layer_ids, ids, 8, set(decoder.stops))
        began = time.perf_counter()
        ours = decoder.generate(ids, max_new_tokens=args.max_new_tokens).token_ids
        middle = time.perf_counter()
        eager = generate(
            target.model, drafter, checkpoint.config.target_layer_ids, ids, args.max_new_tokens, set(decoder.stops)
        )
        for name, spent, text in (("runtime", middle - began, ours), ("eager", time.perf_counter() - middle, eager)):
            seconds[name] += spent
            tokens[name] += len(text)
        differ += ours != eager
        print(f"{number + 1}/{len(prompts)}", file=sys.stderr)
    rates = {name: tokens[name] / seconds[name] for name in seconds}
    report = {
        "prompts": len(prompts),
        "tokens_per_second": rates,
        "ratio": rates["runtime"] / rates["eager"],
        "texts_that_differ": differ,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
