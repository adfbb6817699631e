"""The sizes of a device row, for the ops of the compiler, the scheduler and the executor."""

from __future__ import annotations

WIDTH = 8  # float columns, and as many integer columns, for sampling parameters (see sched.row_columns)
# The columns of a row's drafts, i32[DRAFT_WIDTH]: the number of tokens drafted after the row's last token, its maximum
# (0: none are drafted), and the lengths in tokens of the suffixes that prompt lookup searches for.
DRAFT_COLUMNS = ("num_drafts", "max_drafts", "min_ngram", "max_ngram")
DRAFT_WIDTH = 4
STOPS = 32  # token ids that a row can mask until min_tokens are generated
BIASES = 1024  # token ids that a row can bias
TOP_LOGPROBS = 20  # likeliest tokens whose log-probabilities a step returns
MAX_DRAFTS = 32  # tokens that can be drafted for a row in a step
