"""The columns of a device row that hold sampling parameters, and how many ids a row can list.

The operations of the compiler, the scheduler and the executor take names, order and sizes from here.
"""

from __future__ import annotations

# f32[8], unused columns are 0. A column that has the name of a sampling parameter holds that parameter.
FLOAT_COLUMNS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# i32[8]
INT_COLUMNS = ("top_k", "seed_lo", "seed_hi", "prompt_len", "min_len", "want_logprobs", "num_biases", "masked")
WIDTH = 8
# i32[DRAFT_WIDTH]: the number of tokens drafted behind the row's last token, its maximum (0: none are drafted), and the
# lengths in tokens of the suffixes that prompt lookup searches for.
DRAFT_COLUMNS = ("num_drafts", "max_drafts", "min_ngram", "max_ngram")
DRAFT_WIDTH = 4
STOPS = 32  # token ids that a row can mask until min_tokens are generated
BIASES = 1024  # token ids that a row can bias
TOP_LOGPROBS = 20  # likeliest tokens whose log-probabilities a step returns
MAX_DRAFTS = 32  # tokens that can be drafted for a row in a step
