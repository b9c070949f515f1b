"""Text in and out, held against the tokenizers and transformers libraries."""

import itertools
import json
import random

import builders
import pytest
from answers import first_cut, held_back

from dspark.errors import UsageError
from dspark.runtime.tokens import Detokenizer, Ending, Tokenizer

TEXTS = ["plain text\n", "Grüße, naïve 東京 🙂👩‍👩‍👧 ￿", "\N{REPLACEMENT CHARACTER} stays", "a\x00b", ""]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie heißt 'x'? <b>&amp;</b>"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    builders.write_tokenizer(folder)
    return folder


def with_config(folder, tmp_path, template=None, **settings):
    """A copy of the tokenizer with another config, and with the template only where it is said."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Tokenizer(tmp_path)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(folder, text):
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("seed", range(5))
def test_pieces_never_hold_half_a_character(folder, text, seed):
    """Every byte is a token here: characters are split at every place, and rounds at random ones."""
    tokenizer, rng = Tokenizer(folder), random.Random(seed)
    ids = tokenizer.encode(text)
    detokenizer, pieces = Detokenizer(tokenizer), []
    while ids:
        size = rng.randint(1, 4)
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
        assert text.startswith("".join(pieces))
    pieces.append(detokenizer.push([], last=True))
    assert "".join(pieces) == text


def test_bytes_that_are_no_text(folder):
    """A lone byte is held back while it may still become a character, and shown as such at the end."""
    tokenizer = Tokenizer(folder)
    detokenizer, half = Detokenizer(tokenizer), tokenizer.encode("é")[:1]
    assert detokenizer.push(half) == ""
    assert detokenizer.push(tokenizer.encode("x")) == "\N{REPLACEMENT CHARACTER}x"
    assert detokenizer.push(half) == ""
    assert detokenizer.push([], last=True) == "\N{REPLACEMENT CHARACTER}"


class Bytes:
    """A tokenizer with these pieces of text as its tokens."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids):
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def test_a_stop_string_at_every_place():
    """Every part of a text is the stop string, alone and with another, the text split into tokens at any two bytes: the
    first token that completes it ends the answer, and nothing of it was ever shown."""
    whole = "aé🙂aéa END"
    data = whole.encode()
    stops = sorted({whole[i : i + n] for n in (1, 2, 3, 4, 5) for i in range(len(whole) - n + 1)})
    cases = 0
    for i, j in itertools.combinations(range(1, len(data)), 2):
        pieces = [data[:i], data[i:j], data[j:]]
        for stop in stops:
            strings = [stop, (stops[7 * cases % len(stops)], stop[1:] + "?", "éaé")[cases % 3]]
            ending, shown, read = Ending((), strings, Detokenizer(Bytes(pieces))), "", b""
            for token, piece in enumerate(pieces):
                read += piece
                text = read.decode(errors="replace").rstrip("\N{REPLACEMENT CHARACTER}")
                cut = first_cut(text, strings)
                assert ending.push(token) == ending.stopped == (cut is not None)
                if cut is not None:
                    break
                shown += ending.take()
                assert shown == text[: len(text) - held_back(text, strings)]
            assert cut is not None and shown + ending.take(last=True) == text[:cut]
            cases += 1
    assert cases > 2500


def test_what_was_held_back_is_given_out_at_the_end():
    for strings, pieces, shown in (
        (["END"], [b"x E"], "x "),
        (["END", " EX"], [b"x", b" E"], "x"),
        ([], ["é".encode()[:1]], ""),
        (["ab"], [b"x\xe2", b"\x82"], "x"),
    ):
        ending = Ending((), strings, Detokenizer(Bytes(pieces)))
        assert not any(ending.push(token) for token in range(len(pieces)))
        assert ending.take() == shown
        assert shown + ending.take(last=True) == b"".join(pieces).decode(errors="replace")


def test_a_stop_token_may_hold_a_stop_string():
    ending = Ending([1], ["END"], Detokenizer(Bytes([b"a", b"b END c"])))
    assert not ending.push(0) and ending.push(1)
    assert ending.take(last=True) == "ab "


def test_special_tokens_are_not_text(folder):
    tokenizer = Tokenizer(folder)
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(ids) for ids in (tokenizer.encode("a"), [builders.STOP_TOKEN], tokenizer.encode("b"))]
    assert pieces == ["a", "", "b"]


def test_a_tokenizer_that_spells_a_first_token_differently():
    """Metaspace drops the blank before the first word only; pieces must not drop it again and again."""
    from tokenizers import Tokenizer as Raw
    from tokenizers import decoders, models, pre_tokenizers

    raw = Raw(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer.__new__(Tokenizer)
    tokenizer._tokenizer = raw
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in (0, 1, 2)] == ["one", " two", " three"]


def test_saved_truncation_and_padding_are_off(folder, tmp_path):
    raw = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    raw["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    assert len(Tokenizer(tmp_path).encode("abcdef")) == 6


@pytest.mark.parametrize(
    "template",
    [
        builders.CHAT_TEMPLATE,
        "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m|tojson }}{% endfor %}",
        "{%- for m in messages %}\n    {%- set x = m.content | trim %}\n{{ x }}{{ eos_token }}\n{%- endfor %}\n",
        "{{ messages[0] | tojson(indent=2) }}{{ strftime_now('%Y') }}{% generation %}a{{ 1 }}{% endgeneration %}",
    ],
    ids=["chatml", "loop controls", "blanks", "helpers"],
)
def test_chat_templates_render_as_in_transformers(folder, tmp_path, template):
    from transformers import PreTrainedTokenizerFast

    special = {"bos_token": {"content": "<|im_start|>", "lstrip": False}, "eos_token": "<|im_end|>"}
    ours = with_config(folder, tmp_path, template, **special)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    options = {"chat_template": template, "add_generation_prompt": True, "tokenize": False}
    assert ours.render_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, **options)
    options |= {"tokenize": True, "return_dict": False}
    assert ours.encode_chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, **options)


def test_template_from_the_config(folder, tmp_path):
    assert with_config(folder, tmp_path, chat_template="one").render_chat(MESSAGES) == "one"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    assert with_config(folder, tmp_path, chat_template=named).render_chat(MESSAGES) == "two"
    assert not with_config(folder, tmp_path).has_chat_template


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{{ raise_exception('no system role here') }}", "no system role here"),
        ("{% for %}", "refuses"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ nothing.at.all }}", "refuses"),
        ("{{ 1 + 'a' }}", "refuses"),
        (None, "no chat template"),
    ],
)
def test_template_errors_are_one_line(folder, tmp_path, template, word):
    with pytest.raises(UsageError, match=word) as caught:
        with_config(folder, tmp_path, template).render_chat(MESSAGES)
    assert str(tmp_path) in str(caught.value)


def test_damaged_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    builders.write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(UsageError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path)
