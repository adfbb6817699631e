"""The attacks of row 15, by name: on what orders the requests of keys, and spreads them over several engines.

Priorities count with `--options "--scheduling-policy priority"`, several engines with `--options "-dp 2"`.
"""

from __future__ import annotations

from bench.attacks.further import COMPLETIONS, clients, fixed, repeat
from bench.attacks.further_rows import Attacks, completion, drawn, ids

HIGHEST = -(1 << 31)  # a priority: the smallest runs first


def orders() -> Attacks:
    """Row 15: requests that would run first, or on one engine."""
    long = {"max_tokens": 900, "ignore_eos": True}
    prefix = [7] * 900
    return {
        "8 x n=16 of the highest priority": clients(
            8, repeat(fixed(COMPLETIONS, completion(n=16, priority=HIGHEST, **long)))
        ),
        "32 x prompts of the highest priority": clients(
            32, repeat(drawn(COMPLETIONS, lambda draw: completion(prompt=ids(draw, 900), priority=HIGHEST)))
        ),
        "4 x 128 prompts of 900 ids": clients(
            4, repeat(drawn(COMPLETIONS, lambda draw: completion(prompt=[ids(draw, 900)] * 128, max_tokens=1)))
        ),
        "32 x one prefix": clients(32, repeat(fixed(COMPLETIONS, completion(prompt=prefix, max_tokens=1)))),
        "60 x one prefix, long outputs": clients(
            60, repeat(fixed(COMPLETIONS, completion(prompt=prefix[:100], **long)))
        ),
    }
