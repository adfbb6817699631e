"""The routes of health probes, which need no API key, are not delayed by other requests, and are not logged."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

READY = "/ready"
# Path -> the state that it reports.
PROBES: Mapping[str, str] = MappingProxyType(
    {
        "/health": "Whether the engine is alive",
        "/ping": "The same as /health, under the name that Amazon SageMaker expects",
        READY: "Whether a request would be admitted",
    }
)
