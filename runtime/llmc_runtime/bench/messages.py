"""What the load generator and its client processes send to each other, as lines of JSON: the plan, and the results."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmc_runtime.bench.record import Record
from llmc_runtime.bench.request_bodies import Item, Recipe
from llmc_runtime.bench.workload import Mix


@dataclass(frozen=True)
class Plan:
    """A load for the client processes.

    head:     the head of each request, up to its Content-Length
    timeout:  time limit of a request in seconds
    """

    host: str
    port: int
    tls: bool
    head: str
    recipe: Recipe
    mixes: Sequence[Mix]
    num_warmups: int
    timeout: float

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Plan:
        """Return the plan that `encode` wrote."""
        recipe = values["recipe"]
        recipe["items"] = [Item(**item) for item in recipe["items"]]
        return cls(**values | {"recipe": Recipe(**recipe), "mixes": [Mix(**mix) for mix in values["mixes"]]})


@dataclass(frozen=True)
class ClientResult:
    """The result of a client process, or of all.

    `busy` is the fraction of a core that it used, and `late` the delays of its event loop in seconds, one per
    measurement.
    """

    records: Sequence[Record]
    busy: float
    late: Sequence[float]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ClientResult:
        """Return the result that `encode` wrote."""
        records = [Record(**row | {"gaps": array("f", row["gaps"])}) for row in values["records"]]
        return cls(records, values["busy"], values["late"])


def encode(message: Any) -> str:
    """Return a line of JSON; dataclasses become objects, arrays lists. Infinity is written as Python reads it."""
    return json.dumps(message, default=lambda x: list(x) if isinstance(x, array) else vars(x)) + "\n"
