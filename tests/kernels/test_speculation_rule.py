"""The rule that accepts drafts preserves the distribution of continuations, and the test detects errors in it.

python tests/kernels/test_speculation_rule.py 100000      the same with so many continuations of each setting
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from llmc.ir.ops import OPS
from llmc.ir.ops.sample import kept

V, PROMPT, LENGTH, ROWS, DRAFTS = 4, 2, 3, 1500, 2
TABLE = np.random.default_rng(3).standard_normal((V, V)).astype(np.float32)  # logits after each id
CONTINUATIONS = list(product(range(V), repeat=LENGTH))
SETTINGS = {
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "filters": {"temperature": 1.2, "top_p": 0.85, "top_k": 3},
    "penalties": {"temperature": 1.0, "repetition": 1.6, "presence": 0.5, "frequency": 0.7},
    "mask": {"temperature": 1.0, "masked": 1},
    "guide": {"temperature": 1.0, "top_p": 0.9, "masked": 1 + DRAFTS},
}
GUIDE = np.array([0b1011, 0b1101, 0b0110, 0b1001], np.int32)  # the bitmap after each id, for rows with several


class Device:
    """ROWS device rows with a prompt of two ids, over a model whose logits depend on the last id."""

    def __init__(self, setting: dict[str, float], rows: int = ROWS, seed: int = 11) -> None:
        rng, m = np.random.default_rng(seed), rows
        self.tokens = np.zeros((m, PROMPT + LENGTH + DRAFTS + 2), np.int32)
        self.tokens[:, :PROMPT] = [0, 1]
        self.length, self.counts = np.full(m, PROMPT - 1, np.int32), np.zeros((m, V), np.int32)
        self.f, self.i = np.zeros((m, 8), np.float32), np.zeros((m, 8), np.int32)
        names = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
        defaults = {"top_p": 1.0, "repetition": 1.0}
        self.f[:, : len(names)] = [setting.get(name, defaults.get(name, 0.0)) for name in names]
        self.i[:, 0], self.i[:, 3], self.i[:, 7] = setting.get("top_k", 0), PROMPT, setting.get("masked", 0)
        self.i[:, 1:3] = rng.integers(-(2**31), 2**31, (m, 2))
        self.seen, self.allowed = np.full((m, 1), 0b0011, np.int32), np.full((m, 1 + DRAFTS), 0b1011, np.int32)
        self.bias_ids, self.biases = np.zeros((m, 1), np.int32), np.zeros((m, 1), np.float32)
        self.stops, self.rng = np.full((m, 1), -1, np.int32), rng

    def logits(self, rows: np.ndarray, starts: np.ndarray, positions: np.ndarray, counting: bool) -> np.ndarray:
        """Return the logits that entries sample from, with penalties that count drafts unless `counting` is False."""
        x = TABLE[self.tokens[rows, positions]]
        drafted = (starts, positions, self.tokens) if counting else ()
        states = (self.f, self.i, self.seen, self.counts, self.bias_ids, self.biases)
        x = OPS["row_penalize"].ref(x, rows, *states, *drafted)
        return np.asarray(OPS["row_mask"].ref(x, rows, starts, positions, self.i, self.stops, self.allowed))

    def guide(self, rows: np.ndarray, drafts: int) -> None:
        """Give guided rows a bitmap for the next token and one for the token after each draft."""
        for at in (self.length[rows] + j for j in range(drafts + 1)):
            if self.i[0, 7] > 1:
                self.allowed[rows, (at + 1) % (1 + DRAFTS)] = GUIDE[self.tokens[rows, at]]

    def step(self, drafts: int, accept: Callable[..., Any], counting: bool = True, stops: bool = False) -> None:
        """Draft ids at random, mostly likely ones, and verify them; if it `stops`, those before an unlikely one."""
        live = np.nonzero(self.length < PROMPT + LENGTH - 1)[0]
        made = np.zeros(len(live), np.int64)
        for j in range(1, drafts + 1):
            at = self.length[live] + j
            likely = TABLE[self.tokens[live, at - 1]].argmax(-1)
            other = self.rng.integers(0, V, len(live))
            self.tokens[live, at] = np.where(self.rng.random(len(live)) < 0.6, likely, other)
            made += (made == j - 1) & ((self.tokens[live, at] == likely) | (not stops))
        self.guide(live, drafts)
        rows = np.repeat(live, 1 + made).astype(np.int32)
        starts, _, positions = OPS["row_spans"].ref(rows, np.ones_like(rows), self.length, tokens=len(rows))
        x = self.logits(rows, starts, positions, counting)
        ids = OPS["row_sample"].ref(x, rows, starts, positions, self.tokens, self.f, self.i)
        emit = np.ones_like(rows)
        _, self.tokens, self.length, self.counts = accept(
            self.tokens, self.length, self.counts, rows, starts, positions, emit, ids, limit=max(1, drafts)
        )

    def observed(
        self, drafts: int, accept: Callable[..., Any], counting: bool = True, stops: bool = False
    ) -> np.ndarray:
        """How often each continuation is generated."""
        while (self.length < PROMPT + LENGTH - 1).any():
            self.step(drafts, accept, counting, stops)
        found = self.tokens[:, PROMPT : PROMPT + LENGTH] @ (V ** np.arange(LENGTH)[::-1])
        return np.bincount(found, minlength=V**LENGTH)


def expected(setting: dict[str, float]) -> np.ndarray:
    """The probability of each continuation, token by token, by the definition of a row's distribution."""
    out = []
    for continuation in CONTINUATIONS:
        device, p = Device(setting, 1), 1.0
        for token in continuation:
            one, at = np.zeros(1, np.int32), device.length
            device.guide(one, 0)
            x = device.logits(one, np.array([0, 1]), at, True)[0]
            probabilities, mask = kept(x, device.f[0], int(device.i[0, 0]))
            p *= float(np.where(mask, probabilities, 0)[token] / probabilities[mask].sum())
            device.length = device.length + 1
            device.tokens[0, device.length[0]] = token
            device.counts[0, token] += 1
        out.append(p)
    return np.array(out)


def score(observed: np.ndarray, p: np.ndarray) -> float:
    """Chi-square as a normal deviate (Wilson and Hilferty 1931); infinite if an impossible continuation occurs."""
    if observed[p == 0].any():
        return float("inf")
    want, got = observed.sum() * p[p > 0], observed[p > 0]
    order = np.argsort(want)
    cells = np.cumsum(want[order]) // 20  # unlikely continuations are counted together
    want, got = (np.bincount(np.unique(cells, return_inverse=True)[1], x[order]) for x in (want, got))
    n = len(want) - 1
    chi = float(((got - want) ** 2 / want).sum())
    return float(((chi / n) ** (1 / 3) - (1 - 2 / (9 * n))) / (2 / (9 * n)) ** 0.5)


LIMIT = 3.8  # exceeded by chance with a probability below 1e-4
ACCEPT = OPS["row_accept"].ref


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_continuations_have_the_distribution_of_the_model(name: str) -> None:
    p = expected(SETTINGS[name])
    assert abs(p.sum() - 1) < 1e-9
    for drafts, stops in ((1, False), (DRAFTS, False), (DRAFTS, True)):
        assert score(Device(SETTINGS[name]).observed(drafts, ACCEPT, stops=stops), p) < LIMIT, (drafts, stops)


def test_tokens_are_those_of_plain_decoding() -> None:
    """With the same seeds not only the distribution is the same."""
    for setting in SETTINGS.values():
        found = []
        for drafts, stops in ((0, False), (DRAFTS, False), (DRAFTS, True)):
            device = Device(setting, 150)
            device.observed(drafts, ACCEPT, stops=stops)
            found.append(device.tokens[:, : PROMPT + LENGTH].tolist())
        assert found[0] == found[1] == found[2]


def every_draft(tokens: Any, length: Any, counts: Any, rows: Any, *step: Any, limit: int) -> Any:
    """A rule that accepts one draft in three without a look at the sample."""
    starts, positions, emit, ids = step
    ids = ids.copy()
    lucky = np.random.default_rng(1).random(len(ids)) < 0.3
    for i in np.nonzero(lucky[:-1] & (rows[1:] == rows[:-1]))[0]:
        ids[i] = tokens[rows[i], positions[starts[i + 1]]]
    return ACCEPT(tokens, length, counts, rows, starts, positions, emit, ids, limit=limit)


def rejected_sample(tokens: Any, length: Any, counts: Any, rows: Any, *step: Any, limit: int) -> Any:
    """A rule that draws again after a rejection, from the whole distribution instead of the rest."""
    starts, positions, emit, ids = step
    ids, again = ids.copy(), np.random.default_rng(2).permutation(len(ids))
    for i in np.nonzero(rows[1:] == rows[:-1])[0]:
        wrong = tokens[rows[i], positions[starts[i + 1]]] != ids[i]
        if wrong and ids[again[i]] != tokens[rows[i], positions[starts[i + 1]]]:
            ids[i] = ids[again[i]]
    return ACCEPT(tokens, length, counts, rows, starts, positions, emit, ids, limit=limit)


def sure_drafts(tokens: Any, length: Any, counts: Any, rows: Any, *step: Any, limit: int) -> Any:
    """A rule that accepts one likely draft in four without a look at the sample, where drafting stops at others."""
    starts, positions, emit, ids = step
    ids, sure = ids.copy(), np.random.default_rng(4).random(len(ids)) < 0.25
    for i in np.nonzero(sure[:-1] & (rows[1:] == rows[:-1]))[0]:
        draft = tokens[rows[i], positions[starts[i + 1]]]
        if draft == TABLE[tokens[rows[i], positions[starts[i]]]].argmax():
            ids[i] = draft
    return ACCEPT(tokens, length, counts, rows, starts, positions, emit, ids, limit=limit)


@pytest.mark.parametrize("rule", [every_draft, rejected_sample, sure_drafts])
def test_an_error_in_the_rule_is_seen(rule: Callable[..., Any]) -> None:
    stops = rule is sure_drafts
    assert score(Device(SETTINGS["plain"]).observed(DRAFTS, rule, stops=stops), expected(SETTINGS["plain"])) > LIMIT


def test_penalties_that_ignore_drafts_are_seen() -> None:
    setting = SETTINGS["penalties"]
    assert score(Device(setting).observed(DRAFTS, ACCEPT, counting=False), expected(setting)) > LIMIT


def test_one_mask_for_all_drafts_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def guide(self: Device, rows: np.ndarray, drafts: int) -> None:
        self.allowed[rows] = GUIDE[self.tokens[rows, self.length[rows]]][:, None]

    setting = SETTINGS["guide"]
    p = expected(setting)
    monkeypatch.setattr(Device, "guide", guide)
    assert score(Device(setting).observed(DRAFTS, ACCEPT), p) > LIMIT


def main(rows: int) -> None:
    """Print the deviate of each setting with `rows` continuations; exit with 1 if one is too large."""
    largest = 0.0
    for name, setting in SETTINGS.items():
        for stops in (False, True):
            deviate = score(Device(setting, rows).observed(DRAFTS, ACCEPT, stops=stops), expected(setting))
            what = f"{rows} continuations{' with stops' if stops else ''}"
            print(f"{name}: chi-square of {what}, as a normal deviate: {deviate:.2f}", flush=True)
            largest = max(largest, deviate)
    sys.exit(largest > LIMIT)


if __name__ == "__main__":
    main(int(sys.argv[1]))
