"""The sizes of a device row, for the ops of the compiler, the scheduler and the executor."""

from __future__ import annotations

WIDTH = 8  # float columns, and as many integer columns, for sampling parameters (see sched.row_columns)
STOPS = 32  # token ids that a row can mask until min_tokens are generated
BIASES = 1024  # token ids that a row can bias
TOP_LOGPROBS = 20  # likeliest tokens whose log-probabilities a step returns
