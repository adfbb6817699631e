"""The columns of a device row that hold sampling parameters, derived from the declarations in `SamplingParams`.

A row has WIDTH float columns and WIDTH integer columns; unused ones are 0. Kernels contain the numbers of columns, so
the number of a column never changes. The ops, the scheduler, the executor and the kernels take names and numbers from
this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llmc_runtime.format.row_abi import WIDTH
from llmc_runtime.sched.sampling_params import PARAMETERS

# Integer columns that are not a parameter of the same name; see RowParams.ints.
_COMPUTED: Mapping[str, int] = MappingProxyType(
    {"seed_lo": 1, "seed_hi": 2, "prompt_len": 3, "min_len": 4, "want_logprobs": 5, "num_biases": 6, "masked": 7}
)


def columns(numbers: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names in the order of their numbers; raises ValueError unless these are 0, 1, ... below WIDTH."""
    names = tuple(sorted(numbers, key=lambda name: numbers[name]))
    if [numbers[name] for name in names] != list(range(len(names))) or len(names) > WIDTH:
        raise ValueError(f"columns {dict(numbers)}: expected each number from 0 once, all below {WIDTH}")
    return names


_FLOATS: Mapping[str, int] = MappingProxyType(
    {name: p.float_column for name, p in PARAMETERS.items() if p.float_column is not None}
)
_INTS: Mapping[str, int] = MappingProxyType(
    {name: p.int_column for name, p in PARAMETERS.items() if p.int_column is not None}
)
FLOAT_COLUMNS = columns(_FLOATS)
INT_COLUMNS = columns({**_INTS, **_COMPUTED})
# The values with which a row is greedy and its logits are unchanged.
OFF: Mapping[str, float] = MappingProxyType(
    {name: 0.0 if name == "temperature" else PARAMETERS[name].default for name in (*_FLOATS, *_INTS)}
)
