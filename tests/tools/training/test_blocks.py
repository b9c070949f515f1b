import math
from dataclasses import replace

import pytest
import torch

from dspark.export.modules import Drafter
from dspark.tools.training import blocks
from dspark.tools.training.batches import Recipe, Sampler
from dspark.tools.training.blocks import dense_attend, greedy_drafts, losses, simulate


def plain_attention(anchors, gamma, window, q, k, v, context_k, context_v):
    """float64, one query at a time: the context rows before its anchor (the last `window`), and its block's rows."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for row in range(q.shape[1]):
            anchor, block = int(anchors[b, row // gamma]), slice(row // gamma * gamma, (row // gamma + 1) * gamma)
            seen = slice(max(0, anchor - window) if window else 0, anchor)
            for head in range(q.shape[2]):
                kv = head // (q.shape[2] // k.shape[2])
                keys = torch.cat((context_k[b, seen, kv], k[b, block, kv]))
                values = torch.cat((context_v[b, seen, kv], v[b, block, kv]))
                p = (keys @ q[b, row, head] / math.sqrt(q.shape[-1])).softmax(-1)
                out[b, row, head] = p @ values
    return out


@pytest.mark.parametrize("windows", [(), (0, 3)])
@pytest.mark.parametrize("layer", [0, 1])
def test_dense_attention_is_the_plain_loop(windows, layer):
    generator = torch.Generator().manual_seed(0)
    gamma, anchors = 3, torch.tensor([[4, 1, 9], [2, 0, 5]])

    def rand(rows, heads):
        return torch.randn(2, rows, heads, 8, generator=generator, dtype=torch.float64)

    q, k, v, context_k, context_v = rand(9, 4), rand(9, 2), rand(9, 2), rand(9, 2), rand(9, 2)
    found = dense_attend(anchors, gamma, windows)(layer, q, k, v, context_k, context_v)
    window = windows[layer] if windows else 0
    wanted = plain_attention(anchors, gamma, window, q, k, v, context_k, context_v)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)  # its softmax is fp32


def random_drafter(config, seed=0):
    torch.manual_seed(seed)
    drafter = Drafter(config)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return drafter


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
@pytest.mark.parametrize("reduced", [False, True])
def test_greedy_drafts_feed_every_draft_to_the_next_position(features, make_config, head, reduced):
    config = make_config(head, draft_vocab_size=60 if reduced else 97)
    drafter = random_drafter(config)
    if reduced:
        drafter.d2t.copy_(torch.arange(60) // 2)  # tokens 0, 1, 3, 4, 6, ...
    batch = Sampler(features, config, Recipe()).collate([features.texts[1]], torch.tensor([[5, 9, 12]]))
    lm_head = drafter.lm_head.weight.detach()
    with torch.no_grad():
        found = greedy_drafts(drafter, batch, lm_head)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = blocks.block_states(drafter, batch)
            base = (hidden @ lm_head.T).float()
        hidden = hidden.float()
        for block in range(3):
            previous, markov = batch.tokens[0, block, 0], drafter.markov_head
            state = torch.zeros(1, 6)
            for k in range(config.block_size):
                logits = base[block, k]
                if markov is not None:
                    state, e = markov.step(state, markov.markov_w1(previous)[None], hidden[block, k][None])
                    logits = logits + markov.markov_w2.weight @ e[0]
                index = int(logits.argmax())
                previous = torch.tensor(index + (int(drafter.d2t[index]) if reduced else 0))
                assert int(found[block, k]) == int(previous)


def test_simulation_walks_like_decoding_does(features, config, monkeypatch):
    """Drafts are right with chance 0.6 each; a plain round-by-round walk must count the same."""
    sampler = Sampler(features, config, Recipe())
    gamma, generator = config.block_size, torch.Generator().manual_seed(5)
    drafts = {}
    for text in sampler.texts:
        tokens = features.tokens[text.start : text.start + text.length].tolist()
        for anchor in range(text.prompt, text.length - 1):
            right = torch.rand(gamma, generator=generator) < 0.6
            after = [*tokens[anchor + 1 :], *[0] * gamma]
            drafts[text.start + anchor] = [t if ok else t + 1 for t, ok in zip(after, right.tolist(), strict=False)]

    def table(_drafter, batch, _lm_head):
        first = int(batch.taps[0, 0, 0])  # coded: the text's first row
        return torch.tensor([drafts[first + int(anchor)] for anchor in batch.anchors[0]])

    monkeypatch.setattr(blocks, "greedy_drafts", table)
    found = simulate(Drafter(config), sampler, sampler.texts, torch.zeros(1))

    rounds = accepted = emitted = 0
    reached, kept = [0] * gamma, [0] * gamma
    for text in sampler.texts:
        tokens, at = features.tokens[text.start : text.start + text.length].tolist(), text.prompt
        while at < text.length - 1:
            rounds, n = rounds + 1, 0
            while n < gamma and at + 1 + n < text.length:
                reached[n] += 1
                if drafts[text.start + at][n] != tokens[at + 1 + n]:
                    break
                kept[n] += 1
                n += 1
            new = min(n + 1, text.length - 1 - at)
            accepted, emitted, at = accepted + n, emitted + new, at + n + 1
    rates = [round(k / r, 4) if r else 0.0 for k, r in zip(kept, reached, strict=True)]
    wanted = {"rounds": rounds, "accepted": accepted, "acceptance_length": emitted / rounds, "per_position": rates}
    assert found == wanted
    assert emitted == sum(text.length - 1 - text.prompt for text in sampler.texts)


def test_a_gradient_reaches_every_trained_parameter(features, make_config):
    for head in ("vanilla", "gated", "rnn", "none"):
        config = make_config(head)
        drafter = random_drafter(config)
        sampler = Sampler(features, config, Recipe(texts=2, anchors=3))
        sampler.set_vocabulary(None)
        for part in (drafter.embed_tokens, drafter.lm_head):
            part.requires_grad_(False)
        loss, distance, logits = losses(drafter, sampler.batch(0), drafter.lm_head.weight.detach().bfloat16(), "dspark")
        loss.backward()
        assert distance.shape == (2 * 3 * 4,) and logits.shape == (distance.shape if head != "none" else (0,))
        without = [n for n, p in drafter.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
        assert without == []


def test_the_confidence_loss_trains_the_confidence_head_alone(features, make_config):
    def gradients(drafter):
        config = drafter.config
        sampler = Sampler(features, config, Recipe(texts=2, anchors=3))
        sampler.set_vocabulary(None)
        losses(drafter, sampler.batch(0), drafter.lm_head.weight.detach().bfloat16(), "dspark")[0].backward()
        return {
            name: p.grad
            for name, p in drafter.named_parameters()
            if p.grad is not None and not name.startswith("confidence_head")
        }

    for head in ("vanilla", "rnn"):
        config = replace(make_config(head), confidence=True, confidence_with_markov=True)
        drafter = random_drafter(config)
        bare = Drafter(replace(config, confidence=False, confidence_with_markov=False))
        bare.load_state_dict(drafter.state_dict(), strict=False)
        with_it, without = gradients(drafter), gradients(bare)
        assert with_it.keys() == without.keys()
        for name, gradient in with_it.items():
            assert torch.equal(gradient, without[name]), name
