"""Races of tokens by Gumbel noise: exact chances, also where the same noise has run others before.

argmax(log w + Gumbel) is argmin(E / w) with exponentials E = exp(-Gumbel). Only their ratios matter, so E may be taken
uniform on the simplex, and a race that was won confines it to a polytope there, which simplices make up.
"""

from functools import cache

Weights = tuple[float, ...]  # of all tokens, not normalised
Piece = tuple[float, tuple[tuple[float, ...], ...]]  # share of the whole simplex, corners


def _cut(share: float, corners: tuple, values: tuple[float, ...]) -> tuple[list[Piece], list[Piece]]:
    """The parts of a simplex where a linear function is below and above 0; values: the function at the corners."""
    low, high = min(values), max(values)
    if high < 1e-14:
        return [(share, corners)], []
    if low > -1e-14:
        return [], [(share, corners)]
    a, b = values.index(low), values.index(high)
    t = low / (low - high)
    middle = tuple((1 - t) * x + t * y for x, y in zip(corners[a], corners[b], strict=True))
    below, above = [], []
    for corner, part in ((b, t), (a, 1 - t)):  # the one that the middle replaces, and what that leaves of the volume
        found = _cut(
            share * part,
            (*corners[:corner], middle, *corners[corner + 1 :]),
            (*values[:corner], 0.0, *values[corner + 1 :]),
        )
        below += found[0]
        above += found[1]
    return below, above


def _race(pieces: list[Piece], weights: Weights) -> dict[int, list[Piece]]:
    """What is left of the pieces for each winner."""
    first, *others = [token for token, weight in enumerate(weights) if weight > 0]
    won = {first: pieces}
    for token in others:
        challenged: list[Piece] = []
        for holder, held in won.items():
            kept: list[Piece] = []
            for share, corners in held:
                values = tuple(c[holder] * weights[token] - c[token] * weights[holder] for c in corners)
                below, above = _cut(share, corners, values)
                kept += below
                challenged += above
            won[holder] = kept
        won[token] = challenged
    return won


@cache
def _left(history: tuple[tuple[Weights, int], ...], size: int) -> list[Piece]:
    if not history:
        return [(1.0, tuple(tuple(float(i == j) for j in range(size)) for i in range(size)))]
    weights, winner = history[-1]
    return _race(_left(history[:-1], size), weights)[winner]


@cache
def race_odds(history: tuple[tuple[Weights, int], ...], weights: Weights) -> Weights:
    """The chances of every token, where the same noise ran the races in `history` ((weights, winner), ...)."""
    if not history:
        return tuple(weight / sum(weights) for weight in weights)
    before = sum(share for share, _ in _left(history, len(weights)))
    won = _race(_left(history, len(weights)), weights)
    return tuple(sum(share for share, _ in won.get(token, [])) / before for token in range(len(weights)))
