import pytest
import torch

from dspark.errors import DSparkError
from dspark.export.modules import Drafter
from dspark.tools.training.batches import Recipe, Sampler
from dspark.tools.training.progress import clock
from dspark.tools.training.trainer import acceptance, frozen_head, train


def start(features, config, recipe):
    torch.manual_seed(3)
    sampler = Sampler(features, config, recipe)
    sampler.set_vocabulary(None)
    return Drafter(config), sampler


@pytest.mark.parametrize("head", ["rnn", "none"])
def test_a_resumed_run_gives_the_weights_of_an_uninterrupted_one(features, make_config, tmp_path, head):
    config, recipe = make_config(head), Recipe(steps=6, texts=2, anchors=3, warmup=2)
    whole, sampler = start(features, config, recipe)
    train(whole, sampler, recipe, tmp_path / "whole.pt", log=lambda line: None)

    parts, sampler = start(features, config, recipe)

    def killed():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(parts, sampler, recipe, tmp_path / "parts.pt", killed, every=4, log=lambda line: None)
    torch.manual_seed(99)  # a new process starts from other weights; the checkpoint's count
    parts, lines = Drafter(config), []
    train(parts, sampler, recipe, tmp_path / "parts.pt", log=lines.append)

    assert lines[0] == "resumed at step 4"
    for name, value in whole.state_dict().items():
        assert torch.equal(value, parts.state_dict()[name]), name
    first, second = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "parts"))
    assert first["step"] == second["step"] == 6


def test_a_toy_is_memorised(features, make_config, tmp_path):
    """Targets that are certain of the text's own tokens: the drafter learns the three texts by heart."""
    features.top_ids[:-1, 0] = features.tokens[1:]
    features.top_probs[:] = 0
    features.top_probs[:, 0] = 1
    config = make_config(hidden_size=32, target_layer_ids=(0,))
    features.taps[:] = torch.randn(features.taps.shape, generator=torch.Generator().manual_seed(0))
    recipe = Recipe(steps=150, texts=3, anchors=8, learning_rate=1e-2, warmup=10)
    drafter, sampler = start(features, config, recipe)
    frozen = {name: getattr(drafter, name).weight.clone() for name in ("embed_tokens", "lm_head")}
    before = acceptance(drafter, sampler, frozen_head(drafter))
    lines = []
    train(drafter, sampler, recipe, tmp_path / "run.pt", log=lines.append)
    after = acceptance(drafter, sampler, frozen_head(drafter))
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    assert len(losses) == 3 and losses[-1] < 0.7 * losses[0]
    assert set(after) == {"a", "b"}
    assert all(before[kind]["acceptance_length"] < 1.5 < 2.5 < after[kind]["acceptance_length"] for kind in after)
    assert all(torch.equal(getattr(drafter, name).weight, weight) for name, weight in frozen.items())


def test_a_loss_that_is_not_finite_ends_the_training(features, config, tmp_path):
    recipe = Recipe(steps=3, texts=1, anchors=2)
    drafter, sampler = start(features, config, recipe)
    with torch.no_grad():
        drafter.fc.weight.fill_(torch.nan)
    with pytest.raises(DSparkError, match="loss is nan at step 0"):
        train(drafter, sampler, recipe, tmp_path / "run.pt")
    assert not (tmp_path / "run.pt").exists()


def test_clock():
    assert [clock(s) for s in (0.2, 61, 3661)] == ["0:00:00", "0:01:01", "1:01:01"]
