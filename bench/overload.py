"""Measure goodput and refusals of `llmc-serve` under overload: `python -m bench.overload ARTIFACT [--json]`.

The bench starts a server, measures its peak in closed loops, then offers fixed multiples of that peak in an open loop
(Poisson arrivals, whether or not earlier requests have ended), over kept connections or with a new one for each
request. For each load it reports: goodput (requests a second that completed within the objective), its share of the
peak, latencies of completed and of refused requests, and CPU time of the front, the engine and this client. The client
shares the machine with the server: its CPU share is part of the report because what it takes the server cannot have.
`--apart` keeps it off the server's physical cores, and with `all` the front and the engine off each other's.
`--server-cpus 0,1` gives the server these CPUs alone, from its start, and the client the CPUs of other cores: what two
cores serve to a client on another machine. Sending wakes a client that sleeps on the same machine, for which the server
pays several times as much as for sending itself; `--spin` keeps the client awake, as if it were elsewhere. A load that
is named several times is measured as often, and its median follows the table.

The objective: three times the latency at the peak, plus the time in which a full queue is served at that rate. The
peak is measured again next to each load, before and after it, since the speed of a machine drifts, with as many open
requests as the server admits under overload; a load's share is its goodput over the mean of the two. Lengths of answers
vary, so that requests do not end together.

Other jobs on the machine take time from peak and load unequally. Therefore each load has two further shares, which hold
where the server uses all of its CPUs: completed requests for each CPU second of the server (front end and engine), and
the engine's part of these CPU seconds, each over the same at the two peaks. The latter leaves out how fast the engine
is, which other jobs change, too. A refusal's cost is the front end's CPU time beyond what completed requests take it at
the two peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from bench.overload_client import Client, Log

ROOT = Path(__file__).resolve().parent.parent
TICK = os.sysconf("SC_CLK_TCK")
LOADS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
WARM = 2.0  # seconds of a load before it is measured, besides those that fill the queue
MAX_FILLING = 10.0  # seconds allowed for filling the queue


@dataclass
class Row:
    """One measurement. Rates are per second, latencies in milliseconds, CPU seconds per second."""

    mode: str
    load: float
    rate: float
    sent: float
    goodput: float
    share: float
    cpu_share: float  # completed requests a CPU second of the server, over those at the peak
    engine_share: float  # the engine's part of the server's CPU seconds, over that at the peak
    completed: float
    refused: float
    failed: int
    done_p50: float
    done_p99: float
    refused_p50: float
    refused_p99: float
    front: float
    engine: float
    engine_waits: float  # seconds a second that the engine's threads were ready to run and had no CPU
    client: float
    late_p99: float
    refusal_cpu: float  # milliseconds of the front's CPU a refusal, over what completed requests cost it at the peak


@dataclass
class Peak:
    """A peak: requests a second, and CPU seconds of the front end and of the engine for each request."""

    rate: float
    front: float
    engine: float

    def mean(self, other: Peak) -> Peak:
        """Return the mean of two."""
        return Peak(*(statistics.mean(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


class Server:
    """A running `llmc-serve`: its port and its processes."""

    def __init__(self, artifact: str, options: Sequence[str], cpus: Collection[int] = ()) -> None:
        """Start it on `cpus` (empty: on those of this process) and wait until it is ready."""
        code = "import sys; from llmc_runtime.cli import main_serve; sys.exit(main_serve())"
        paths = [str(ROOT), str(ROOT / "runtime"), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        own_cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus or own_cpus)  # children inherit it
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, artifact, "--port", "0", *options], stderr=subprocess.PIPE, text=True, env=env
        )
        os.sched_setaffinity(0, own_cpus)
        self.lines, self.port, self.last, there = 0, 0, "", threading.Event()

        def read() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines, self.last = self.lines + 1, line
                if not there.is_set() and (address := re.search(r" at http://[^ ]*:(\d+)$", line.strip())):
                    self.port = int(address[1])
                    there.set()
            there.set()

        threading.Thread(target=read, daemon=True).start()
        if not there.wait(120) or not self.port:
            self.process.kill()
            raise SystemExit(f"the server did not start:\n{self.last}")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.engine = int(children[0])

    def cpu(self) -> tuple[float, float, float, float]:
        """CPU seconds so far of the front end and the engine, seconds in which the engine waited for a CPU, and CPU
        seconds of this process.
        """
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return _cpu(self.process.pid), _cpu(self.engine), _waits(self.engine), usage.ru_utime + usage.ru_stime

    def keep_apart(self, mode: str) -> None:
        """Pin this process (with "all", also the front end and the engine) to physical cores that the others do not
        use.
        """
        cores = physical_cores()
        if len(cores) < 4:
            raise SystemExit(f"--apart needs 4 physical cores, and there are {len(cores)}")
        client, front, rest = cores[0], cores[1], sorted(set().union(*cores[2:]))
        places = [(os.getpid(), client), (self.process.pid, front if mode == "all" else [*front, *rest])]
        places.append((self.engine, rest if mode == "all" else [*front, *rest]))
        for pid, cpus in places:
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), cpus)
        print("CPUs: client, front, engine:", *(cpus for _, cpus in places), file=sys.stderr)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def _waits(pid: int) -> float:
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def physical_cores() -> list[list[int]]:
    """Return the CPUs that this process may use, grouped by physical core."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        cores.setdefault(siblings, []).append(cpu)
    return list(cores.values())


def leave(cpus: Collection[int]) -> None:
    """Keep this process off the physical cores of `cpus`. Raises SystemExit if that leaves no CPU."""
    rest = [cpu for core in physical_cores() if not set(cpus) & set(core) for cpu in core]
    if not rest or not set(cpus) <= os.sched_getaffinity(0):
        raise SystemExit(f"--server-cpus {sorted(cpus)}: not available here, or no core is left for the client")
    os.sched_setaffinity(0, rest)
    print("CPUs: server, client:", sorted(cpus), rest, file=sys.stderr)


def medians(rows: list[Row]) -> list[str]:
    """Describe the medians of the loads that were measured several times."""
    lines = []
    for mode, load in dict.fromkeys((row.mode, row.load) for row in rows):
        runs = [row for row in rows if (row.mode, row.load) == (mode, load)]
        if len(runs) > 1:
            share, per_cpu, engine, p50, p99, cpu = (
                statistics.median(getattr(row, name) for row in runs)
                for name in ("share", "cpu_share", "engine_share", "refused_p50", "refused_p99", "refusal_cpu")
            )
            lines.append(
                f"median of {len(runs)}, {mode}, {load:g} times the peak: goodput {share:.0%}, "
                f"by CPU time {per_cpu:.0%}, engine's part {engine:.0%}, refusals p50 / p99 {p50:.1f} / {p99:.1f} ms, "
                f"{cpu:.3f} ms of the front end each"
            )
    return lines


def costs(rows: list[Row]) -> list[str]:
    """Describe the CPU time of the front end for a refusal, over all loads of a mode together."""
    lines = []
    for mode in dict.fromkeys(row.mode for row in rows):
        of_mode = [row for row in rows if row.mode == mode]
        if refused := sum(row.refused for row in of_mode):
            cost = sum(row.refusal_cpu * row.refused for row in of_mode) / refused
            lines.append(f"all loads, {mode}: {cost:.3f} ms of the front end's CPU time for each refusal")
    return lines


def requests_of(args: argparse.Namespace, keep: bool) -> list[bytes]:
    """Return completions of token ids, as bytes, whose outputs have between half of and one and a half times
    `output_len` tokens.
    """
    lengths = range(args.output_len // 2, args.output_len * 3 // 2 + 1)
    return [_request(args, keep, length) for length in random.Random(5).sample(lengths, len(lengths))]


def _request(args: argparse.Namespace, keep: bool, length: int) -> bytes:
    """Return a completion of `length` tokens; without keep-alive it sends `Connection: close`."""
    ids = [random.Random(7).randrange(10, 400) for _ in range(args.input_len)]
    body = {"prompt": ids, "max_tokens": length, "ignore_eos": True, "temperature": 0}
    data = json.dumps(body).encode() + b" " * args.padding
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    head += "Content-Type: application/json\r\nUser-Agent: bench\r\nAccept: */*\r\n"
    return (head + ("\r\n" if keep else "Connection: close\r\n\r\n")).encode() + data


def closed(client: Client, server: Server, width: int, seconds: float) -> tuple[Log, list[float]]:
    """Keep `width` requests open; return what ended within `seconds` after warming up, and the CPU seconds."""
    log, begin, before = Log(), time.perf_counter() + WARM, None
    end = begin + seconds
    for _ in range(width):
        client.start(time.perf_counter(), log)
    while (now := time.perf_counter()) < end:
        if before is None and now >= begin:
            before = server.cpu()
        for _ in range(client.wait(min(end - now, 0.1), log)):
            client.start(time.perf_counter(), log)
    after = server.cpu()
    client.rest(log)
    return log.within(begin, end), [b - a for a, b in zip(before or after, after, strict=True)]


def filling(queue: int, rate: float, peak: float) -> float:
    """Return the seconds in which a load above the peak fills the queue; 0 for other loads.

    Until then the server parses and queues more requests than it completes, and refuses few of them.
    """
    return queue / (rate - peak) if rate > peak else 0.0


def offered(client: Client, server: Server, rate: float, warm: float, seconds: float) -> tuple[Log, list[float]]:
    """Send requests at `rate` at random times; return what ended within `seconds` after the first `warm` seconds, and
    the CPU seconds.
    """
    draw, log, before = random.Random(11), Log(), None
    due = time.perf_counter()
    begin = due + warm
    end = begin + seconds
    while (due := due + draw.expovariate(rate)) < end:
        while (now := time.perf_counter()) < due:
            client.wait(due - now, log)
        if before is None and due >= begin:
            before = server.cpu()
        client.start(due, log)
        client.wait(0.0, log)
    after = server.cpu()
    client.rest(log)
    return log.within(begin, end), [b - a for a, b in zip(before or after, after, strict=True)]


def measured(server: Server, keep: bool, args: argparse.Namespace) -> list[Row]:
    """Measure every load over one kind of connections."""
    client = Client(server.port, keep, requests_of(args, keep), args.spin)

    def peak(width: int) -> tuple[Peak, Log]:
        log, cpu = closed(client, server, width, args.seconds)
        number = max(1, len(log.done))
        return Peak(len(log.done) / args.seconds, cpu[0] / number, cpu[1] / number), log

    best, log = max((peak(width) for width in args.widths), key=lambda result: result[0].rate)
    took = statistics.median(took for _, took in log.done)
    objective = 3 * took + args.queue / best.rate
    mode, clients = "kept" if keep else "new", args.queue + rows_of(args.artifact)
    print(f"{mode}: peak {best.rate:.1f}/s at {1e3 * took:.0f} ms, objective {objective:.2f} s", file=sys.stderr)
    rows, last = [], peak(clients)[0]
    for load in args.loads:
        rate = load * last.rate
        warm = WARM + min(MAX_FILLING, filling(args.queue, rate, last.rate))
        log, cpu = offered(client, server, rate, warm, args.seconds)
        before, last = last, peak(clients)[0]
        rows.append(row(mode, load, rate, before.mean(last), log, cpu, args.seconds, objective))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def rows_of(artifact: str) -> int:
    """Return how many requests an artifact runs at a time."""
    return int(json.loads((Path(artifact) / "manifest.json").read_text())["limits"]["max_num_seqs"])


def row(
    mode: str, load: float, rate: float, peak: Peak, log: Log, cpu: list[float], seconds: float, objective: float
) -> Row:
    """Return the figures of one load; `peak` is the mean of those next to it."""
    good = sum(took <= objective for _, took in log.done) / seconds
    number = len(log.done)
    extra = (cpu[0] - peak.front * number) / len(log.refused) if log.refused else 0.0
    ours, at_peak = cpu[0] + cpu[1], peak.front + peak.engine
    shares = good / peak.rate, at_peak * number / ours, cpu[1] / ours * at_peak / peak.engine
    done, refused = ([took for _, took in events] for events in (log.done, log.refused))
    return Row(
        mode, load, rate, len(log.late) / seconds, good, *shares, number / seconds,
        len(refused) / seconds, log.failed,
        *(1e3 * quantile(values, q) for values in (done, refused) for q in (0.5, 0.99)),
        *(spent / seconds for spent in cpu), 1e3 * quantile([late for _, late in log.late], 0.99), 1e3 * extra,
    )  # fmt: skip


def quantile(values: list[float], q: float) -> float:
    """Return the value below which a fraction `q` of the values lies; 0 if there are none."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


HEAD = (
    "mode   load offered/s  sent/s  good/s  share  by CPU  engine  done p50/p99 ms   refused/s  p50/p99 ms  failed   "
    "CPU front engine (waits) client late ms  ms/refusal"
)


def line(row: Row) -> str:
    """Return a row of the table as text."""
    return (
        f"{row.mode:5} {row.load:5g} {row.rate:8.1f} {row.sent:7.1f} {row.goodput:7.1f} {row.share:6.0%} "
        f"{row.cpu_share:7.0%} {row.engine_share:7.1%} {row.done_p50:7.0f} {row.done_p99:7.0f} "
        f"{row.refused:9.1f} {row.refused_p50:7.1f} {row.refused_p99:7.1f} "
        f"{row.failed:7d} {row.front:11.2f} {row.engine:6.2f} {row.engine_waits:7.3f} {row.client:6.2f} "
        f"{row.late_p99:7.1f} {row.refusal_cpu:11.3f}"
    )


def main() -> None:
    """Measure, and print a table or JSON."""
    ap = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__.split("\n\n")[0])
    ap.add_argument("artifact")
    ap.add_argument("--json", action="store_true", help="print the rows as JSON")
    ap.add_argument("--loads", type=float, nargs="+", default=LOADS, help="offered rates as multiples of the peak")
    ap.add_argument(
        "--modes", nargs="+", choices=("kept", "new"), default=("kept", "new"), help="kinds of connections to measure"
    )
    ap.add_argument(
        "--widths", type=int, nargs="+", default=(16, 32), help="numbers of open requests tried to find the peak"
    )
    ap.add_argument("--seconds", type=float, default=10.0, help="seconds of each measurement (10)")
    ap.add_argument("--input-len", type=int, default=64, help="tokens of a prompt (64)")
    ap.add_argument("--output-len", type=int, default=64, help="tokens of an answer (64)")
    ap.add_argument("--padding", type=int, default=0, help="bytes of white space after each body (0)")
    ap.add_argument("--queue", type=int, default=64, help="--max-num-queued-reqs of the server (64)")
    ap.add_argument("--apart", choices=("client", "all"), help="processes to pin to physical cores of their own")
    ap.add_argument(
        "--server-cpus", type=lambda text: [int(cpu) for cpu in text.split(",")], default=[], metavar="N,N",
        help="CPUs of the server; the client uses other cores",
    )  # fmt: skip
    ap.add_argument("--spin", action="store_true", help="the client polls without sleeping; it needs a CPU of its own")
    ap.add_argument("--server-options", default="", help="further options of the server, in one argument")
    args = ap.parse_args()
    options = ["--max-num-queued-reqs", str(args.queue), *args.server_options.split()]
    server = Server(args.artifact, options, args.server_cpus)
    try:
        if args.server_cpus:
            leave(args.server_cpus)
        if args.apart:
            server.keep_apart(args.apart)
        rows = [row for mode in args.modes for row in measured(server, mode == "kept", args)]
    finally:
        server.stop()
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print("\n".join([HEAD, *map(line, rows), *medians(rows), *costs(rows)]))
    print(f"lines of the server's log: {server.lines}", file=sys.stderr)


if __name__ == "__main__":
    main()
