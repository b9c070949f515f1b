import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.errors import UsageError
from dspark.tools.prompts import Prompt
from dspark.tools.training.responses import read_responses, write_responses

STOP = 39


class Bytes:
    """A tokenizer with no chat template: one id a letter."""

    chat_template = None

    def encode(self, text):
        return [ord(letter) % 30 for letter in text]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.6,
        bos_token_id=1,
        eos_token_id=STOP,
    )
    return LlamaForCausalLM(config).eval()


PROMPTS = [Prompt(f"p{n}", "ab"[n % 2], text) for n, text in enumerate(["hello", "a", "some more", "xy", "the end"])]


def answers(file):
    return {r["id"]: (r["kind"], r["prompt"], r["response"]) for r in read_responses(file)}


def greedy(model, ids, limit):
    ids = list(ids)
    for end in range(len(ids) + 1, len(ids) + limit + 1):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == STOP or len(ids) == end + limit:
            break
    return ids


def test_responses_are_greedy_continuations_up_to_the_stop_token(model, tmp_path):
    write_responses(model, Bytes(), PROMPTS, tmp_path / "r.jsonl", max_new_tokens=12, batch_size=3)
    found = answers(tmp_path / "r.jsonl")
    assert set(found) == {p.id for p in PROMPTS}
    for p in PROMPTS:
        kind, ids, response = found[p.id]
        assert (kind, ids) == (p.kind, Bytes().encode(p.prompt))
        with torch.no_grad():
            assert ids + response == greedy(model, ids, 12)
    lengths = {len(response) for _, _, response in found.values()}
    assert lengths <= set(range(1, 13))


def test_a_response_ends_with_its_first_stop_token(model, tmp_path):
    model.generation_config.eos_token_id = [STOP, *range(20)]  # half of all tokens stop
    try:
        write_responses(model, Bytes(), PROMPTS, tmp_path / "r.jsonl", max_new_tokens=12)
    finally:
        model.generation_config.eos_token_id = STOP
    for _, _, response in answers(tmp_path / "r.jsonl").values():
        stops = [i for i, token in enumerate(response) if token < 20 or token == STOP]
        assert stops in ([], [len(response) - 1])


def test_an_interrupted_run_continues(model, tmp_path):
    whole, file = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    write_responses(model, Bytes(), PROMPTS, whole, max_new_tokens=8, batch_size=2)

    def killed(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_responses(model, Bytes(), PROMPTS, file, max_new_tokens=8, batch_size=2, progress=killed)
    with open(file, "a") as out:
        out.write('{"id": "p4", "kin')  # what a kill in the middle of a write leaves
    seen = []
    write_responses(
        model, Bytes(), PROMPTS, file, max_new_tokens=8, batch_size=2, progress=lambda *state: seen.append(state)
    )
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert file.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("prompt", ["", [3, 40], [-1]])
def test_prompts_that_the_target_cannot_read_are_named(model, tmp_path, prompt):
    bad = Prompt("bad", "a", prompt, "prompts.jsonl: line 6")
    with pytest.raises(UsageError, match=f"line 6: prompt 'bad'.*{prompt[-1] if prompt else 'empty'}"):
        write_responses(model, Bytes(), [*PROMPTS, bad], tmp_path / "r.jsonl", max_new_tokens=2)
    assert not (tmp_path / "r.jsonl").exists()


def test_a_file_that_answers_other_prompts_is_refused(model, tmp_path):
    file = tmp_path / "r.jsonl"
    write_responses(model, Bytes(), PROMPTS[:2], file, max_new_tokens=2)
    with pytest.raises(UsageError, match="other prompts"):
        write_responses(model, Bytes(), [Prompt("p0", "a", "changed"), *PROMPTS[1:]], file, max_new_tokens=2)
    with pytest.raises(UsageError, match="other prompts"):
        write_responses(model, Bytes(), PROMPTS[1:], file, max_new_tokens=2)
