import pytest
import torch

from dspark.errors import UsageError
from dspark.tools.training.batches import Recipe, Sampler


def test_the_rate_warms_up_stays_and_cools_down():
    recipe = Recipe(steps=100, learning_rate=2.0, warmup=10, cooldown=0.3)
    assert [recipe.rate(step) for step in (0, 4, 9, 50, 70)] == pytest.approx([0.2, 1.0, 2.0, 2.0, 2.0])
    assert recipe.rate(85) == pytest.approx(1.0)
    assert recipe.rate(100) == 0.0


def test_a_batch_depends_on_seed_and_step_only(features, config):
    recipe = Recipe(texts=3, anchors=5, seed=7)
    first, second = Sampler(features, config, recipe), Sampler(features, config, recipe)
    first.batch(0)
    a, b = first.batch(3), second.batch(3)
    assert torch.equal(a.anchors, b.anchors) and torch.equal(a.taps, b.taps)
    assert not torch.equal(a.anchors, first.batch(4).anchors)
    assert a.anchors.shape == (3, 5) and a.tokens.shape == (3, 5, 4)


def test_anchors_lie_in_the_response_with_a_token_after_them(features, config):
    sampler = Sampler(features, config, Recipe(anchors=500, max_context=12))
    for text in features.texts:
        anchors = sampler.anchors_of(text, torch.Generator().manual_seed(0))
        assert anchors.min() == text.prompt
        assert anchors.max() == min(text.length, 12) - 2


def test_collation_takes_every_row_from_where_it_belongs(features, config):
    """Text 1 is rows 9..28 of the store; anchor 7 of it is row 16."""
    sampler = Sampler(features, config, Recipe())
    sampler.set_vocabulary(None)
    text, gamma, anchors = features.texts[1], config.block_size, torch.tensor([[7, 5, 18]])
    batch = sampler.collate([text], anchors)
    tokens = features.tokens[9:29].long()

    assert batch.taps.shape == (1, 18, 32)  # context rows 0 .. largest anchor - 1
    assert batch.taps[0, :, 0].tolist() == list(range(9, 27))  # coded: first tap = row of the store
    mask = config.mask_token_id
    assert batch.tokens[0].tolist() == [[int(tokens[a]), mask, mask, mask] for a in (7, 5, 18)]
    assert batch.previous[0, 0].tolist() == tokens[7:11].tolist()
    ids = batch.targets.ids.view(3, gamma, -1)
    assert ids[0, :, 0].tolist() == [16, 17, 18, 19]  # coded: row i's most probable token is i
    assert batch.targets.label.view(3, gamma)[1].tolist() == tokens[6:10].tolist()

    # Anchor 18 is followed by one token, the text's last: three of its positions lie past the end.
    weight = batch.targets.weight.view(3, gamma)
    assert (weight[2, 1:] == 0).all() and (weight[:2] > 0).all() and weight[2, 0] > 0
    torch.testing.assert_close(weight.sum(), torch.tensor(1.0))
    torch.testing.assert_close(weight[0, 1] / weight[0, 0], torch.tensor(-1 / 4.0).exp())


def test_a_short_text_beside_a_long_one_stays_in_its_own_rows(features, config):
    batch = Sampler(features, config, Recipe()).collate(features.texts[:2], torch.tensor([[4], [15]]))
    assert batch.taps[0, :, 0].max() == 8  # the last row of text 0, repeated as padding that no anchor sees
    assert batch.taps[1, :, 0].tolist() == list(range(9, 24))


def test_tokens_outside_the_draft_vocabulary_have_the_index_after_its_last(features, make_config):
    config = make_config(draft_vocab_size=10)
    sampler = Sampler(features, config, Recipe())
    sampler.set_vocabulary(torch.full((10,), 13))  # tokens 13 .. 22
    batch = sampler.collate([features.texts[1]], torch.tensor([[5]]))
    row = 9 + 5
    assert batch.targets.ids[0].tolist()[:11] == [row - 13 + k if row + k <= 22 else 10 for k in range(11)]
    label = int(features.tokens[row + 1])
    assert int(batch.targets.label[0]) == (label - 13 if 13 <= label <= 22 else 10)


def test_texts_without_two_response_tokens_are_left_out(features, config):
    features.texts = [t for t in features.texts if t.kind == "b"]
    assert len(Sampler(features, config, Recipe()).texts) == 1
    features.texts = []
    with pytest.raises(UsageError, match="two tokens"):
        Sampler(features, config, Recipe())
