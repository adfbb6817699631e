"""Ranks that a real Ray cluster places: `.ci/ray` runs these tests in an environment with the extra `ray`."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from kernel_cache import CACHE
from llmc_runtime import LLM, AsyncLLM, SamplingParams
from llmc_runtime.exec.group_executor import GroupExecutor
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.host_info import usable_cpus
from models.test_rank_failures import answer, ended, until

from llmc.driver import compile_model
from llmc.options import Options

pytest.importorskip("ray")
DEMO = Path(__file__).parents[2] / "examples" / "demo-model-small"
RAY = Path(sys.executable).with_name("ray")
PROMPT = {"prompt_token_ids": [7, 11, 13, 17]}
PARAMS = SamplingParams(temperature=1, seed=5, max_tokens=30, ignore_eos=True)
STARTED = 200.0  # seconds for a node of Ray


class Cluster:
    """Nodes of Ray on this machine; `variables` are those of a client."""

    def __init__(self, stack: ExitStack, token: str) -> None:
        self._stack = stack
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/dev/shm"))  # a short path
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self.variables = {"RAY_ADDRESS": self._address, "RAY_AUTH_TOKEN": token, "RAY_AUTH_MODE": "token"}
        if not token:
            self.variables = {"RAY_ADDRESS": self._address, "RAY_AUTH_MODE": "disabled"}

    def node(self, cpus: int, ip: str = "127.0.0.1") -> None:
        """Start a node; the first one is the head."""
        port = self._address.rpartition(":")[2]
        head = not os.listdir(self._folder)
        of_head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        words = of_head if head else [f"--address={self._address}"]
        command = [RAY, "start", "--block", "--disable-usage-stats", f"--num-cpus={cpus}", f"--node-ip-address={ip}"]
        log = Path(self._folder).with_suffix(".log")
        self._stack.callback(log.unlink, missing_ok=True)
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*command, "--object-store-memory=100000000", *words],
                env=os.environ | self.variables, stdout=out, stderr=out,
            )  # fmt: skip
        self._stack.callback(_end, process)
        before = log.read_text().count("Ray runtime started")
        limit = time.monotonic() + STARTED
        while log.read_text().count("Ray runtime started") <= before:
            assert process.poll() is None and time.monotonic() < limit, log.read_text()[-2000:]
            time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def cluster(*cpus: int, token: str | None = None) -> Iterator[Cluster]:
    """A cluster of nodes with these CPUs."""
    with ExitStack() as stack:
        made = Cluster(stack, secrets.token_hex(32) if token is None else token)
        for count in cpus:
            made.node(count)
        yield made


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """Two nodes of this machine, with two CPUs each."""
    with cluster(2, 2) as made:
        yield made


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "two.llmc"
    compile_model(DEMO, path, Options(cache=CACHE, tensor_parallel_size=2))
    return path


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves an actor, a process that talks to Ray, or a folder for sockets."""
    with tempfile.TemporaryDirectory() as scratch:
        monkeypatch.setenv("TMPDIR", scratch)
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        yield
        assert ended([*running("ray::RankActor"), *running("ray_launcher")])
        assert not os.listdir(scratch)


def running(words: str) -> list[int]:
    """The processes with these words in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and words.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def use(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # a client sets it by itself


def opened(artifact: Path, **options: Any) -> LLM:
    options = {"threads": 1, "distributed_executor_backend": "ray"} | options
    return LLM(artifact, say=lambda line: None, **options)


def tokens_of(llm: LLM) -> list[int]:
    return list(llm.generate([PROMPT], PARAMS, use_tqdm=False)[0].outputs[0].token_ids)


def test_actors_sample_the_tokens_of_processes(
    artifact: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(two_nodes.variables, monkeypatch)
    with opened(artifact, distributed_executor_backend="mp") as llm:
        want = tokens_of(llm)
    with opened(artifact) as llm:
        assert isinstance(llm.engine.executor, GroupExecutor)
        pids = llm.engine.executor.group.pids
        assert tokens_of(llm) == want and pids == running("ray::RankActor")
        os.kill(pids[0], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(LlmcError) as failed:
                tokens_of(llm)
            assert failed.value.code == "E119" and f"the actor of rank 1, process {pids[0]}" in failed.value.cause


def test_an_actor_that_stops_is_noticed_and_ended(
    artifact: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(two_nodes.variables, monkeypatch)
    with opened(artifact, heartbeat_timeout=0.4) as llm:
        (pid,) = running("ray::RankActor")
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LlmcError, match="rank 1 sent no heartbeat") as failed:
            tokens_of(llm)
        assert failed.value.code == "E119" and ended([pid])


def test_groups_of_two_engines_are_on_two_nodes_and_one_returns(
    artifact: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    if usable_cpus() < 2:
        pytest.skip("two engines need two CPUs")
    use(two_nodes.variables, monkeypatch)

    async def main() -> None:
        options = {"threads": 1, "data_parallel_size": 2, "restart_delay": 0.0, "distributed_executor_backend": "ray"}
        async with AsyncLLM(artifact, say=lambda line: None, **options) as llm:
            actors = running("ray::RankActor")
            assert len(actors) == 2 and len({_parent(pid) for pid in actors}) == 2
            running_now = [asyncio.create_task(answer(llm, [5 + i, 6])) for i in range(4)]
            await asyncio.sleep(0.05)
            os.kill(actors[0], signal.SIGKILL)
            killed = time.monotonic()
            outs = await asyncio.gather(*running_now)
            assert time.monotonic() - killed < 10
            assert {one.code for one in outs if isinstance(one, LlmcError)} <= {"E119"}
            await until(lambda: llm.restarts == 1 and all(engine.state == "ready" for engine in llm.engines))
            assert len(running("ray::RankActor")) == 2
            assert not [one for i in range(4) if isinstance(one := await answer(llm, [5 + i, 6]), LlmcError)]

    asyncio.run(main())


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_actors_end_with_a_parent_that_is_killed(
    artifact: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(two_nodes.variables, monkeypatch)
    options = "threads=1, distributed_executor_backend='ray'"
    code = f"from llmc_runtime import LLM; llm = LLM({str(artifact)!r}, {options}); print('open', flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"open\n"
        actors = running("ray::RankActor")
        assert len(actors) == 1
        parent.kill()
    assert ended(actors)


def refused(artifact: Path, code: str, *words: str, **options: Any) -> None:
    began = time.monotonic()
    with pytest.raises(LlmcError) as failed:
        opened(artifact, **options)
    text = str(failed.value)
    assert failed.value.code == code and failed.value.remedy, text
    assert not [word for word in words if word not in text], text
    assert time.monotonic() - began < 60


def test_a_cluster_that_is_too_small(artifact: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    use(two_nodes.variables, monkeypatch)
    words = "2 ranks of 3 threads need 6 CPUs", "one Ray node of this machine; its nodes have 2, 2\n"
    refused(artifact, "E142", *words, "ray start --num-cpus 6", threads=3)


def test_a_group_is_on_two_nodes_if_none_has_the_cpus(
    artifact: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(two_nodes.variables, monkeypatch)
    with opened(artifact, distributed_executor_backend="mp") as llm:
        want = tokens_of(llm)
    monkeypatch.setattr("llmc_runtime.exec.ray_ranks._CPU_SECONDS", 2.0)
    with opened(artifact, threads=2) as llm:
        assert tokens_of(llm) == want
        refused(artifact, "E142", "0 of 4 CPUs of the cluster are free", threads=1)  # both nodes are taken wholly


def test_a_group_does_not_leave_this_machine(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with another address counts as another machine."""
    with cluster(1) as small:
        small.node(4, "127.0.0.2")
        use(small.variables, monkeypatch)
        refused(artifact, "E142", "need 2 CPUs", "its nodes have 1;", "cannot run on other machines", "5 CPUs in all")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RAY_AUTH_TOKEN": None}, ("there is no token", "RAY_AUTH_TOKEN_PATH")),
        ({"RAY_AUTH_TOKEN": "0" * 64}, ("refuses the token", "RAY_AUTH_TOKEN_PATH")),
        ({"RAY_ADDRESS": "nonsense"}, ("cannot be reached", "RAY_ADDRESS")),
        ({"RAY_ADDRESS": "127.0.0.1:1"}, ("did not answer", "RAY_ADDRESS")),
    ],
)
def test_a_cluster_that_cannot_be_used(
    artifact: Path, change: dict[str, str | None], words: tuple[str, ...], two_nodes: Cluster,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))  # whose ~/.ray/auth_token is a token, too
    monkeypatch.setattr("llmc_runtime.exec.ray_ranks._CONNECT_SECONDS", 12.0)
    use({k: v for k, v in (two_nodes.variables | change).items() if v is not None}, monkeypatch)
    refused(artifact, "E141", *words)


def test_a_cluster_without_authentication_is_refused(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(2, token="") as free:
        use(free.variables | {"RAY_AUTH_TOKEN": "0" * 64}, monkeypatch)
        refused(artifact, "E141", "without authentication", "RAY_AUTH_MODE=token")


def test_cpus_that_others_use(artifact: Path, two_nodes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    use(two_nodes.variables, monkeypatch)
    monkeypatch.setattr("llmc_runtime.exec.ray_ranks._CPU_SECONDS", 2.0)
    with opened(artifact), opened(artifact):
        refused(artifact, "E142", "other Ray jobs use them: 0 of 4 CPUs of the cluster are free")
    opened(artifact).close()
