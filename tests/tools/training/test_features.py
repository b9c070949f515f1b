import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.tools.training.features import TOP_K, Features, write_features

TAPS = (-1, 0, 2)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=80,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def responses():
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(80, (n,), generator=generator).tolist()

    return [{"kind": f"k{n % 2}", "prompt": ids(3 + n), "response": ids(9 - 2 * n)} for n in range(4)]


def test_every_row_is_what_the_target_says_about_that_token(model, tmp_path):
    rows = responses()
    write_features(model, rows, TAPS, tmp_path / "features", batch_tokens=30)  # several batches, with padding
    features = Features(tmp_path / "features")
    assert features.target_layer_ids == TAPS and len(features.texts) == len(rows)
    for text in features.texts:
        part = slice(text.start, text.start + text.length)
        ids = features.tokens[part].tolist()
        row = next(r for r in rows if r["prompt"] + r["response"] == ids)
        assert (text.kind, text.prompt) == (row["kind"], len(row["prompt"]))
        with torch.no_grad():
            out = model(torch.tensor([ids]), output_hidden_states=True)
        states = torch.cat([out.hidden_states[i + 1][0] for i in TAPS], dim=-1)
        torch.testing.assert_close(features.taps[part].float(), states, rtol=2e-2, atol=2e-2)
        top = out.logits[0].softmax(-1).topk(TOP_K)
        response = slice(text.start + text.prompt, text.start + text.length)
        torch.testing.assert_close(
            features.top_probs[response].float(), top.values[text.prompt :], rtol=2e-3, atol=1e-4
        )
        assert torch.equal(features.top_ids[response, 0].long(), top.indices[text.prompt :, 0])


def test_an_interrupted_run_leaves_no_folder_and_a_new_one_replaces(model, tmp_path):
    folder = tmp_path / "features"

    def killed(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_features(model, responses(), TAPS, folder, batch_tokens=30, progress=killed)
    assert list(tmp_path.iterdir()) == []
    write_features(model, responses(), TAPS, folder)
    write_features(model, responses()[:2], TAPS, folder)
    assert len(Features(folder).texts) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["features"]
