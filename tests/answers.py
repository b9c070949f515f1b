"""What a turn has to return: fake text for the fake target's tokens, and a plain reference of where an answer ends."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fakes import MASK, STOPS, Language

PROMPT = [3, 1, 4, 1, 5]
BEGIN, FINISH, WHOLE = 34, 35, 36  # "E" and "ND" across two tokens, and a token that has all of it inside
STOP_TEXT = "END"
USER_STOP = 33

# Bytes of every token: letters, pieces of characters, and a stop string in pieces and whole. Stop tokens have no text.
PIECES: dict[int, bytes] = {
    **{token: bytes([97 + token]) for token in range(24)},
    24: b"\xc3",  # é
    25: b"\xa9",
    26: b"\xf0\x9f",  # 🙂
    27: b"\x99\x82",
    28: b" ",
    29: b"E",
    30: b"N",
    31: b"D\xf0",  # the end of a stop string and the beginning of a character
    32: b"xEN",
    USER_STOP: b"!",
    BEGIN: b"E",
    FINISH: b"ND",
    WHOLE: b"y ENDz",
    MASK: b"_",
}


class PieceTokenizer:
    """decode only."""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(PIECES.get(token, b"") for token in ids).decode(errors="replace")


class Calm(Language):
    """Says letters, unless something is planted."""

    def next(self, prefix: Sequence[int]) -> int:
        return self.planted.get(len(prefix), self.hash(prefix) % 24)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    finish: str
    text: str


def certain(tokens: Sequence[int]) -> str:
    """The text that no further token changes."""
    return PieceTokenizer().decode(tokens).rstrip("\N{REPLACEMENT CHARACTER}")


def held_back(text: str, strings: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string may begin with."""
    return max((n for s in strings for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


def first_cut(text: str, strings: Sequence[str]) -> int | None:
    return min((at for s in strings if (at := text.find(s)) >= 0), default=None)


def answer(said: Sequence[int], limit: int, stop_ids: Collection[int], strings: Sequence[str] = ()) -> Answer:
    """The answer where the target says `said`: token after token, the whole text read anew after each."""
    for count in range(1, limit + 1):
        tokens, text = list(said[:count]), certain(said[:count])
        cut = first_cut(text, strings)
        if tokens[-1] in stop_ids or cut is not None:
            return Answer(tokens, "stop", PieceTokenizer().decode(tokens) if cut is None else text[:cut])
    return Answer(tokens, "length", PieceTokenizer().decode(tokens))


def check_chunks(chunks: Sequence, strings: Sequence[str]) -> None:
    """Nothing that was shown is taken back, and nothing is held back but what may begin a stop string."""
    last = chunks[-1].generation
    assert [token for chunk in chunks for token in chunk.token_ids] == last.token_ids
    assert "".join(chunk.text for chunk in chunks) == last.text
    assert first_cut(last.text, strings) is None
    assert [chunk.generation for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    shown, tokens = "", []
    for chunk in chunks[:-1]:
        shown, tokens = shown + chunk.text, tokens + chunk.token_ids
        text = certain(tokens)
        assert shown == text[: len(text) - held_back(text, strings)]
        assert last.text.startswith(shown)


# Every way to decode. At this temperature the fake target's law has one token, so all of them say the same text.
COLD = 0.01
MODES = {
    "greedy": {},
    "exact drawn": {"temperature": COLD, "sampling": "exact", "scheduler": "off"},
    "exact gated": {"temperature": COLD, "sampling": "exact"},
    "exact argmax": {"temperature": COLD, "sampling": "exact", "draft_temperature": 0.0},
    "coupled": {"temperature": COLD, "sampling": "coupled"},
    "opportunistic": {"temperature": COLD, "sampling": "opportunistic"},
    "plain": {"mode": "plain"},
    "plain drawn": {"mode": "plain", "temperature": COLD},
    "strict": {"mode": "strict"},
    "strict drawn": {"mode": "strict", "temperature": COLD, "sampling": "exact"},
}
assert not {USER_STOP, BEGIN, FINISH, WHOLE} & set(STOPS)
