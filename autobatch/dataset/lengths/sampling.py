"""Estimate the lengths of a data set from some of its rows, drawn by strata of text length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autobatch.records import SampledRows

CONTAINER = 16  # characters that a message or list counts for: templates print about as many
_STRATUM_ROWS = 8  # drawn from each stratum, about
_MOST_STRATA = 50
_MOST_CANDIDATES = 64  # longest texts that are read in the first round
_MARGIN = 1.25  # how much denser than any row read a longer one may be
_SIGMAS = 1.96  # 95 %
# Of the sum of all tokens: strata of eight skewed draws understate it (on our six test sets, 40
# seeds each, 1.96 held for 82 to 97 %).
_TOTAL_SIGMAS = 2.6
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

# Given ascending row numbers (over all files), return the tokens of each, -1 where skipped.
ReadRows = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The rows that were read, and how many rows each of them stands for."""

    rows: np.ndarray  # int64 (n,), ascending, over all files
    weights: np.ndarray  # int64 (n,), their sum is the number of all rows
    sampled: SampledRows


def text_size(value: Any) -> int:
    """Return about how many characters a row prints: its texts, some more for each part."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return CONTAINER + sum(map(text_size, value.values()))
    if isinstance(value, list):
        return CONTAINER + sum(map(text_size, value))
    return 1


def draw_rows(sizes: np.ndarray, read: ReadRows, *, num_rows: int, seed: int = 0) -> Draw:
    """Return which rows of int64 `sizes` (N,) were read by `read`, with their weights.

    About `num_rows` are drawn from strata of like size. The longest texts are read besides: as
    long as an unread row could be the longest in tokens if it were as dense as the densest of
    the longer half of the rows read (tokens per character), it is read too. So the longest is
    exact unless a row is denser than all of those.
    """
    order = np.argsort(-sizes, kind="stable")
    num_longest = min(_MOST_CANDIDATES, num_rows // 4)
    rng = np.random.default_rng(seed)
    strata = _strata(order[num_longest:], sizes, num_rows - num_longest, rng)
    drawn = np.concatenate([order[:num_longest], *(chosen for _, chosen in strata)])
    tokens = np.full(len(sizes), -2, dtype=np.int64)  # -2: not read
    threshold, density = np.inf, 0.0
    certain = np.zeros(len(sizes), dtype=bool)
    certain[order[:num_longest]] = True
    wanted = drawn
    while len(wanted):
        wanted = np.sort(wanted)
        tokens[wanted] = read(wanted)
        done = np.flatnonzero(tokens >= 0)
        if not len(done):
            break
        half = done[sizes[done] >= np.median(sizes[done])]
        density = _MARGIN * float(np.max(tokens[half] / np.maximum(sizes[half], 1)))
        threshold = tokens.max() / max(density, 1e-9)
        wanted = np.flatnonzero((tokens == -2) & (sizes > threshold))
        certain[wanted] = True
    certain |= sizes > threshold
    return _weigh(sizes, tokens, certain, strata, density, seed)


def _strata(
    order: np.ndarray, sizes: np.ndarray, num_rows: int, rng: np.random.Generator
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (rows, drawn rows) of each stratum of rows ordered by size, descending.

    Strata hold the same characters, not the same rows, so the long end is drawn densely.
    """
    if not len(order):
        return []
    num_strata = max(1, min(_MOST_STRATA, num_rows // _STRATUM_ROWS))
    ends = np.cumsum(np.maximum(sizes[order], 1).astype(float))
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_strata) / num_strata)
    parts = [part for part in np.split(order, np.unique(cuts)) if len(part)]
    each = max(2, round(num_rows / len(parts)))
    return [(part, rng.choice(part, min(len(part), each), replace=False)) for part in parts]


def _weigh(
    sizes: np.ndarray,
    tokens: np.ndarray,
    certain: np.ndarray,
    strata: list[tuple[np.ndarray, np.ndarray]],
    density: float,
    seed: int,
) -> Draw:
    weights = np.zeros(len(sizes), dtype=np.int64)
    weights[certain] = 1
    groups: list[tuple[int, np.ndarray]] = []  # rows of the stratum, those that stand for them
    waiting = 0  # rows of strata in which none was drawn: the next stratum stands for them
    for part, chosen in strata:
        waiting += int((~certain[part]).sum())
        chosen = chosen[~certain[chosen]]
        if not len(chosen):
            continue
        weights[chosen] = waiting // len(chosen)
        weights[chosen[: waiting % len(chosen)]] += 1
        groups.append((waiting, chosen))
        waiting = 0
    if waiting:  # none after it: the last that was drawn
        num_rows, chosen = groups.pop()
        weights[chosen[0]] += waiting
        groups.append((num_rows + waiting, chosen))
    rows = np.flatnonzero(weights)
    return Draw(
        rows=rows,
        weights=weights[rows],
        sampled=SampledRows(
            num_rows_read=int((tokens > -2).sum()),
            num_rows=len(sizes),
            seed=seed,
            tokens_per_character=round(density, 4),
            **_errors(tokens, rows, weights[rows], groups),
        ),
    )


def _errors(
    tokens: np.ndarray,
    rows: np.ndarray,
    weights: np.ndarray,
    groups: list[tuple[int, np.ndarray]],
) -> dict[str, Any]:
    """Return the errors at 95 %: of percentiles in tokens, of all tokens as a share.

    A percentile's interval is the distribution's own, turned around (Woodruff 1952; Lohr,
    Sampling: Design and Analysis, section 9.5), with the variance of stratified draws.
    """
    read = tokens[rows]
    rendered = read >= 0
    order = np.argsort(read[rendered], kind="stable")
    lengths = read[rendered][order]
    share = np.cumsum(weights[rendered][order])
    if not len(lengths):
        return {"error_tokens": {}, "num_tokens_error_fraction": 0.0}
    num_all = int(share[-1])

    def index_at(p: float) -> int:
        index = int(np.searchsorted(share, min(max(p, 0.0), 1.0) * num_all - 1e-9))
        return min(index, len(lengths) - 1)

    def at(p: float) -> int:
        return int(lengths[index_at(p)])

    errors = {}
    for name, p in _PERCENTILES.items():
        estimate = at(p)
        # a row that stands for many says nothing about the lengths between it and the next
        own = int(weights[rendered][order][index_at(p)])
        spread = (_SIGMAS * _share_deviation(groups, tokens, estimate) + own) / num_all
        errors[name] = max(at(p + spread) - estimate, estimate - at(p - spread))
    total = int((lengths * np.diff(share, prepend=0)).sum())
    deviation = _total_deviation(groups, tokens)
    return {
        "error_tokens": errors,
        "num_tokens_error_fraction": round(_TOTAL_SIGMAS * deviation / max(1, total), 6),
    }


def _share_deviation(
    groups: list[tuple[int, np.ndarray]], tokens: np.ndarray, length: int
) -> float:
    """Return the standard error of the number of rows of at most `length` tokens.

    Around the strata that hold both kinds, one more row of each kind is taken as seen: a few
    draws that agree do not prove that all rows do.
    """
    shares = [float(np.mean(tokens[chosen] <= length)) for _, chosen in groups]
    mixed = [i for i, share in enumerate(shares) if 0 < share < 1]
    if not mixed:  # all below one stratum are shorter, all above it longer
        border = next((i for i, share in enumerate(shares) if share == 1), len(shares))
        mixed = [border - 1, border]
    variance = 0.0
    for i, (num_rows, chosen) in enumerate(groups):
        if min(mixed) - 1 <= i <= max(mixed) + 1 and len(chosen) < num_rows:
            n = len(chosen)
            p = (shares[i] * n + 1) / (n + 2)
            variance += num_rows**2 * (1 - n / num_rows) * p * (1 - p) / n
    return float(np.sqrt(variance))


def _total_deviation(groups: list[tuple[int, np.ndarray]], tokens: np.ndarray) -> float:
    """Return the standard error of the number of all tokens."""
    variance = 0.0
    for num_rows, chosen in groups:
        if 1 < len(chosen) < num_rows:
            spread = float(np.var(np.maximum(tokens[chosen], 0), ddof=1))
            variance += num_rows**2 * (1 - len(chosen) / num_rows) * spread / len(chosen)
    return float(np.sqrt(variance))


def apportion(total: int, counts: Mapping[str, int]) -> dict[str, int]:
    """Return whole shares of a total in the proportion of counts, largest remainders up."""
    num = sum(counts.values())
    if not num:
        return {}
    shares = {name: total * count // num for name, count in counts.items()}
    rest = sorted(counts, key=lambda name: -(total * counts[name] % num))
    for name in rest[: total - sum(shares.values())]:
        shares[name] += 1
    return {name: share for name, share in shares.items() if share}


def picked(rows: Iterator[Any], wanted: np.ndarray) -> Iterator[Any]:
    """Yield the items at ascending positions."""
    position = 0
    for i, row in enumerate(rows):
        if position == len(wanted):
            return
        if i == wanted[position]:
            position += 1
            yield row
