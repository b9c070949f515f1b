import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.errors import UsageError
from dspark.export.checkpoints import load_checkpoint
from dspark.export.modules import Drafter
from dspark.tools.training.checkpoint import save_drafter
from dspark.tools.training.start import (
    choose_vocabulary,
    continue_from,
    default_taps,
    drafter_config,
    initialise,
    read_start,
    target_weights,
)


def test_the_most_frequent_tokens_are_chosen_and_the_lowest_ids_fill_up():
    tokens = torch.tensor([7, 7, 7, 9, 9, 3, 5])
    assert (choose_vocabulary(tokens, 2, 12) + torch.arange(2)).tolist() == [7, 9]
    assert (choose_vocabulary(tokens, 6, 12) + torch.arange(6)).tolist() == [0, 1, 3, 5, 7, 9]
    assert choose_vocabulary(tokens, 12, 12) is None


def test_default_taps_are_those_of_the_published_checkpoints():
    assert default_taps(36) == (1, 9, 17, 25, 33)
    assert default_taps(40) == (1, 10, 19, 28, 37)
    for layers in range(1, 12):
        taps = default_taps(layers)
        assert taps == tuple(sorted(set(taps))) and taps[0] >= -1 and taps[-1] <= layers - 2


TARGET = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
OPTIONS = {
    "layers": 2,
    "block_size": 5,
    "target_layer_ids": (-1, 2),
    "mask_token_id": 49,
    "draft_vocab_size": 50,
    "markov_head_type": "vanilla",
    "markov_rank": 8,
}


def test_a_drafter_has_the_shape_of_its_target():
    config = drafter_config(TARGET, **OPTIONS)
    assert (config.hidden_size, config.head_dim, config.num_target_layers) == (32, 8, 4)
    assert config.rope["rope_theta"] == 10000.0
    assert config.confidence and config.confidence_with_markov
    dflash = drafter_config(TARGET, **{**OPTIONS, "markov_head_type": "none"})
    assert (dflash.markov_rank, dflash.confidence) == (0, False)


@pytest.mark.parametrize(
    "option, value, named",
    [
        ("target_layer_ids", (3,), "--taps"),
        ("target_layer_ids", (-2,), "--taps"),
        ("target_layer_ids", (2, 1), "--taps"),
        ("mask_token_id", 50, "--mask-token-id"),
        ("mask_token_id", -1, "--mask-token-id"),
        ("draft_vocab_size", 51, "--draft-vocab-size"),
        ("layers", 5, "--layers"),
        ("markov_rank", 33, "--markov-rank"),
        ("markov_rank", 0, "--markov-rank"),
    ],
)
def test_options_that_do_not_fit_the_target_are_refused_by_name(option, value, named):
    with pytest.raises(UsageError, match=named):
        drafter_config(TARGET, **{**OPTIONS, option: value})


def test_a_drafter_starts_from_the_last_layers_of_its_target():
    model = LlamaForCausalLM(TARGET)
    drafter = Drafter(drafter_config(TARGET, **{**OPTIONS, "draft_vocab_size": 20}))
    d2t = choose_vocabulary(torch.arange(30, 50), 20, 50)
    initialise(drafter, target_weights(model, 2), d2t)
    assert torch.equal(drafter.embed_tokens.weight, model.model.embed_tokens.weight)
    assert torch.equal(drafter.lm_head.weight, model.lm_head.weight[30:50])
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, model.model.layers[2].mlp.up_proj.weight)
    assert torch.equal(drafter.layers[1].self_attn.k_proj.weight, model.model.layers[3].self_attn.k_proj.weight)
    last_tap = drafter.fc.weight[:, -32:]
    assert torch.linalg.matrix_norm(last_tap - torch.eye(32)) < 0.15 * torch.linalg.matrix_norm(last_tap)
    assert not drafter.markov_head.markov_w2.weight.any()  # the start is the base logits alone


def trained(tmp_path, **changes):
    """A checkpoint folder with random weights, as read back."""
    torch.manual_seed(1)
    drafter = Drafter(drafter_config(TARGET, **{**OPTIONS, "draft_vocab_size": 20, **changes}))
    drafter.d2t += torch.arange(20) // 2
    save_drafter(drafter, tmp_path / "first")
    return load_checkpoint(tmp_path / "first")


def test_a_training_goes_on_from_another_drafter_whatever_its_head(tmp_path):
    checkpoint = trained(tmp_path, markov_head_type="none")
    drafter = Drafter(drafter_config(TARGET, **{**OPTIONS, "draft_vocab_size": 20, "markov_head_type": "rnn"}))
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    continue_from(drafter, checkpoint)
    after = drafter.state_dict()
    assert len(checkpoint.tensors) > 20
    for name, value in checkpoint.tensors.items():
        assert torch.equal(after[name], value.to(after[name].dtype)), name
    heads = {name for name in before if torch.equal(before[name], after[name])}
    assert heads >= {"markov_head.markov_w1.weight", "markov_head.joint_proj.weight", "confidence_head.proj.weight"}


@pytest.mark.parametrize(
    "changes, key", [({"layers": 1}, "num_hidden_layers"), ({"target_layer_ids": (0, 2)}, "target_layer_ids")]
)
def test_a_drafter_of_other_sizes_is_no_start(tmp_path, changes, key):
    config = drafter_config(TARGET, **{**OPTIONS, "draft_vocab_size": 20})
    with pytest.raises(UsageError, match=f"--start-from .*first: its {key} is .*, this training's "):
        read_start(trained(tmp_path, **changes).folder, config)
