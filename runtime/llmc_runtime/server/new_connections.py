"""Sets up the light connections of a server: new ones are sockets without a parser (see http.light_connections)."""

from __future__ import annotations

from uvicorn.server import ServerState

from llmc_runtime.server.http.event_loop import ServerLoop
from llmc_runtime.server.http.light_connections import LightConnections, Refuse
from llmc_runtime.server.http.plain_errors import closing_response, head_timeout, too_many_connections
from llmc_runtime.server.protocol import HttpConnection


def light_connections(
    loop: ServerLoop, protocol: type[HttpConnection], state: ServerState, keep_alive: float
) -> LightConnections:
    """Return the light connections of a server whose others are instances of `protocol` and share `state`."""
    limit, shed, fair = protocol.limit, protocol.shed, loop.fair
    assert shed is not None
    shed.overloaded = lambda: fair.batching

    def on_change(change: int) -> None:
        limit.open += change

    def full_response() -> bytes:
        limit.on_refused()
        return closing_response(too_many_connections())

    def refusals() -> Refuse | None:
        return shed.turn(state.default_headers) if shed.active else None

    light = LightConnections(
        fair,
        capacity=lambda: max(0, limit.maximum - limit.open),
        refusals=refusals,
        on_change=on_change,
        timeout_response=head_timeout(protocol.head_seconds),
        head_seconds=protocol.head_seconds,
        keep_alive=keep_alive,
        turns=limit.head_turns,
        full_response=full_response,
        probe=lambda head: shed.probe(head, state.default_headers),
    )
    limit.evict_light = light.evict
    return light
