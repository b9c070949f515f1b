import pytest
import torch

from dspark.tools.training.loss import CHUNK, DistributionLoss, Targets, confidence_loss

N, H, R, V = CHUNK + 22, 12, 5, 40  # more rows than one chunk


def plain_loss(x, head, w2, target, label, weight, ce=0.1, tv=0.9):
    """ce CE + tv L1, float64, dense. What target [N, V] misses to 1 lies outside the draft vocabulary."""
    logits = x[:, :H] @ head.T
    if w2 is not None:
        logits = logits + x[:, H:] @ w2.T
    p = logits.softmax(-1)
    distance = (p - target).abs().sum(-1) + (1 - target.sum(-1)).clamp(min=0)
    known = label < V
    cross_entropy = torch.where(known, -logits.log_softmax(-1)[torch.arange(len(x)), label.clamp(max=V - 1)], 0)
    return (weight * (ce * cross_entropy + tv * distance)).sum(), distance


@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("outside", [0, 7])
@pytest.mark.parametrize("objective, ce, tv", [("dspark", 0.1, 0.9), ("dflash", 1, 0)])
def test_value_and_gradients_are_those_of_the_plain_formula(markov, outside, objective, ce, tv):
    generator = torch.Generator().manual_seed(1)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, head = rand(N, H + (R if markov else 0)), rand(V, H) / 3
    w2 = rand(V, R) / 3 if markov else None
    full = (2 * rand(N, V + outside)).softmax(-1)  # the target over its whole vocabulary
    label = torch.randint(V + outside, (N,), generator=generator).clamp(max=V)
    weight = torch.rand(N, generator=generator, dtype=torch.float64)
    wanted_inputs = [t.clone().requires_grad_() for t in ([x, w2] if markov else [x])]
    wanted, wanted_distance = plain_loss(
        wanted_inputs[0], head, wanted_inputs[1] if markov else None, full[:, :V], label, weight, ce, tv
    )
    wanted_grads = torch.autograd.grad(3 * wanted, wanted_inputs)

    # Tokens outside of the draft vocabulary all carry the index V.
    ids = torch.arange(V + outside).clamp(max=V).expand(N, -1).contiguous()
    targets = Targets(ids, full.float(), label, weight.float())
    inputs = [t.detach().float().requires_grad_() for t in wanted_inputs]
    loss, distance = DistributionLoss.apply(inputs[0], head.float(), inputs[1] if markov else None, targets, objective)
    grads = torch.autograd.grad(3 * loss, inputs)

    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(distance.double(), wanted_distance, rtol=1e-5, atol=1e-5)
    for found, expected in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_rows_of_weight_zero_do_not_count():
    x, head = torch.randn(4, H), torch.randn(V, H)
    ids, probs = torch.arange(V).expand(4, -1).contiguous(), torch.full((4, V), 1 / V)
    weight = torch.tensor([0.5, 0.5, 0.0, 0.0])
    first, _ = DistributionLoss.apply(x, head, None, Targets(ids, probs, torch.tensor([1, 2, 3, 4]), weight), "dspark")
    x[2:] = 100 * torch.randn(2, H)
    second, _ = DistributionLoss.apply(x, head, None, Targets(ids, probs, torch.tensor([1, 2, 5, 6]), weight), "dspark")
    assert first == second


def test_confidence_is_trained_towards_the_chance_of_acceptance():
    logits, distance, weight = torch.tensor([0.3, -1.0]), torch.tensor([0.4, 1.8]), torch.tensor([0.25, 0.75])
    label, c = 1 - distance / 2, torch.sigmoid(logits)
    wanted = -(weight * (label * c.log() + (1 - label) * (1 - c).log())).sum()
    torch.testing.assert_close(confidence_loss(logits, distance, weight), wanted)
