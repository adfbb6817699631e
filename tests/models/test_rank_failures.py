"""Ranks are killed, stopped or send wrong data: all requests end, the group restarts, no process or file remains."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_cache import CACHE
from llmc_runtime import LLM, AsyncLLM, RequestOutput, SamplingParams
from llmc_runtime.artifact import open_artifact
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.rank_group import RankGroup
from llmc_runtime.exec.rank_messages import Done, Join
from llmc_runtime.exec.rank_process import open_rank
from llmc_runtime.format.errors import LlmcError
from models.cases import SMALL, Case
from models.kit import save

from llmc.driver import compile_model
from llmc.options import Options

PARAMS = SamplingParams(temperature=1, seed=5, max_tokens=60, ignore_eos=True)
PROMPTS = [[7 + i, 11, 13 + i, 17] for i in range(6)]
RANKS = 3
SIZES = {"hidden_size": 96, "vocab_size": 321, "num_attention_heads": 6, "num_key_value_heads": 3}
HEADS = Case("heads", "llama", SMALL | SIZES)
LATEST = 5.0  # seconds until a request gets its error, on a machine that runs other tests; alone it takes 0.2
Ended = RequestOutput | LlmcError
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model for three ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    save(HEADS, folder / "model", 3)
    limits = {"max_model_len": 96, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    options = Options(cache=CACHE, reuse=False, tensor_parallel_size=RANKS, **limits)
    compile_model(folder / "model", folder / "model.llmc", options)
    return folder / "model.llmc"


@pytest.fixture(scope="module")
def tokens(artifact: Path) -> list[list[int]]:
    """The tokens that follow each prompt."""
    with opened(artifact) as llm:
        outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
        return [list(out.outputs[0].token_ids) for out in outs]


def opened(artifact: Path) -> LLM:
    return LLM(artifact, say=lambda line: None, threads=1)


def ranks_of(parent: int) -> list[int]:
    """The processes of ranks that a process has started, in order."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b"rank_process" in (entry / "cmdline").read_bytes():
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(status[1]) == parent and status[0] != "Z":
                    found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return sorted(found)


def ended(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether these processes end in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in _status(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


async def answer(llm: AsyncLLM, prompt: list[int]) -> Ended:
    try:
        async for out in llm.generate({"prompt_token_ids": prompt}, PARAMS, "r", output_kind="final_only"):
            last = out
        return last
    except LlmcError as e:
        return e


async def until(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def test_kills_under_load(artifact: Path, tokens: list[list[int]], request: pytest.FixtureRequest) -> None:
    """`--kills N` kills N times. A request ends with its tokens or with an error, soon after the kill."""
    kills, failed, right = request.config.getoption("--kills"), 0, 0
    pids: list[int] = []
    waits: list[float] = []  # seconds from a kill until the last request has ended

    async def main() -> None:
        nonlocal failed, right
        options = {"max_restarts": 10**6, "restart_delay": 0.0, "threads": 1}
        async with AsyncLLM(artifact, say=lambda line: None, **options) as llm:
            for done in range(kills):
                await until(lambda done=done: llm.restarts >= done and llm.engines[0].state == "ready")
                engine = llm.engines[0].pid
                assert engine is not None
                group = [engine, *ranks_of(engine)]
                assert len(group) == RANKS
                pids.extend(group)
                running = [asyncio.create_task(answer(llm, p)) for p in PROMPTS]
                await asyncio.sleep(random.random() * 0.1)
                os.kill(random.choice(group), signal.SIGKILL)
                killed = time.monotonic()
                for one, want in zip(await asyncio.gather(*running), tokens, strict=True):
                    if isinstance(one, LlmcError):
                        assert one.code in ("E119", "E660", "E661")
                        failed += 1
                    else:
                        assert list(one.outputs[0].token_ids) == want
                        right += 1
                waits.append(time.monotonic() - killed)
            await until(lambda: llm.restarts >= kills and llm.engines[0].state == "ready")
            last = [await answer(llm, p) for p in PROMPTS[:2]]
            assert [list(one.outputs[0].token_ids) for one in last if isinstance(one, RequestOutput)] == tokens[:2]
            pids.extend(ranks_of(llm.engines[0].pid or 0))

    asyncio.run(main())
    assert failed + right == kills * len(PROMPTS)
    waits.sort()
    shown = f"{kills} kills, {failed} errors, {right} answers; last error after {waits[kills // 2]:.3f} s"
    print(f"{shown} (median), {waits[kills * 99 // 100]:.3f} s (p99), {waits[-1]:.3f} s (maximum)")
    assert waits[kills // 2] < 1 and waits[-1] < LATEST, shown
    assert ended(pids) and not [name for name in os.listdir("/dev/shm") if "llmc" in name]


@pytest.mark.parametrize("idle", [False, True])
def test_a_rank_that_stops_is_noticed_by_its_heartbeats(artifact: Path, idle: bool) -> None:
    async def main() -> tuple[list[int], list[Ended]]:
        lines: list[str] = []
        async with AsyncLLM(artifact, say=lines.append, restart_delay=0.0, threads=1, heartbeat_timeout=1.0) as llm:
            pids = ranks_of(llm.engines[0].pid or 0)
            running = [asyncio.create_task(answer(llm, p)) for p in PROMPTS if not idle]
            os.kill(random.choice(pids), signal.SIGSTOP)
            failed = await asyncio.gather(*running)
            await until(lambda: llm.restarts == 1 and llm.engines[0].state == "ready")
            assert any("sent no heartbeat for" in line for line in lines)
            assert isinstance(await answer(llm, PROMPTS[0]), RequestOutput)
            return pids, failed

    pids, failed = asyncio.run(main())
    assert all(isinstance(one, LlmcError) and one.code == "E119" for one in failed) and ended(pids)


def test_a_rank_that_stops_for_a_moment_goes_on(artifact: Path, tokens: list[list[int]]) -> None:
    with LLM(artifact, say=lambda line: None, threads=1, heartbeat_timeout=20.0) as llm:
        pid = random.choice(ranks_of(os.getpid()))
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
        outs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], PARAMS, use_tqdm=False)
        assert [list(out.outputs[0].token_ids) for out in outs] == tokens


def test_llm_names_the_rank_that_was_stopped(artifact: Path) -> None:
    with LLM(artifact, say=lambda line: None, threads=1, heartbeat_timeout=0.3) as llm:
        pids = ranks_of(os.getpid())
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(LlmcError) as failed:
            llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS, use_tqdm=False)
        assert failed.value.code == "E119" and "rank 1 sent no heartbeat for 0.3 s" in failed.value.cause
    assert ended(pids)


def test_an_idle_group_returns(artifact: Path) -> None:
    async def main() -> None:
        async with AsyncLLM(artifact, say=lambda line: None, restart_delay=0.0, threads=1) as llm:
            os.kill(ranks_of(llm.engines[0].pid or 0)[0], signal.SIGKILL)
            await until(lambda: llm.restarts == 1 and llm.engines[0].state == "ready")
            assert isinstance(await answer(llm, PROMPTS[0]), RequestOutput)

    asyncio.run(main())


def test_llm_names_the_rank_that_was_killed(artifact: Path) -> None:
    llm = opened(artifact)
    pids = ranks_of(os.getpid())
    os.kill(pids[1], signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(LlmcError) as failed:
            llm.generate([{"prompt_token_ids": PROMPTS[0]}], PARAMS, use_tqdm=False)
        assert failed.value.code == "E119" and "rank 2 was ended by SIGKILL" in failed.value.cause
    llm.close()
    assert ended(pids)


def test_ctrl_c_leaves_the_ranks_at_the_same_step(artifact: Path, tokens: list[list[int]]) -> None:
    def interrupt(seconds: float) -> None:
        subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, 2)"])

    # A shell starts background jobs with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    with opened(artifact) as llm:
        for _ in range(3):
            interrupt(0.2)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    llm.generate(prompts, PARAMS, use_tqdm=False)
            outs = llm.generate(prompts, PARAMS, use_tqdm=False)
            assert [list(out.outputs[0].token_ids) for out in outs] == tokens


def test_ranks_end_with_a_parent_that_is_killed(artifact: Path) -> None:
    code = f"from llmc_runtime import LLM; llm = LLM({str(artifact)!r}, threads=1); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"open\n"
        pids = ranks_of(parent.pid)
        assert len(pids) == RANKS - 1
        parent.kill()
    assert ended(pids)


def test_the_number_of_ranks_must_be_that_of_the_artifact(artifact: Path) -> None:
    with pytest.raises(LlmcError) as failed:
        LLM(artifact, tensor_parallel_size=2)
    assert failed.value.code == "E207" and "--tensor-parallel-size 2" in failed.value.remedy
    assert ranks_of(os.getpid()) == []
    LLM(artifact, tensor_parallel_size=RANKS, threads=1).close()


def test_ray_has_to_be_installed_and_needs_several_ranks(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LlmcError) as failed:
        LLM(artifact, threads=1, distributed_executor_backend="ray")
    assert failed.value.code == "E140" and "[ray]'" in failed.value.remedy
    with pytest.raises(LlmcError, match=r"distributed_executor_backend = 'dask'") as failed:
        LLM(artifact, distributed_executor_backend="dask")
    assert failed.value.code == "E201" and "mp or ray" in failed.value.remedy
    one = replace(open_artifact(artifact).manifest, ranks=1)
    with pytest.raises(LlmcError, match="has 1 rank") as failed:
        EngineOptions(artifact, distributed_executor_backend="ray").check_artifact(one)
    assert failed.value.code == "E207"


def test_a_rank_with_another_artifact_is_refused(artifact: Path) -> None:
    with pytest.raises(LlmcError) as failed:
        open_rank(Join(str(artifact), "0" * 64, 1, RANKS, 1, 1 << 20, 1.0, True), -1)
    assert failed.value.code == "E118"


def test_other_tokens_of_a_rank_end_the_group(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = RankGroup(open_artifact(artifact), 1)
    monkeypatch.setattr("llmc_runtime.exec.rank_group.RankProcess.receive", lambda self, *kinds: Done(self.rank))
    with pytest.raises(LlmcError, match="rank 2 computed other tokens"):
        group.collect(1)
    group.close()


def test_damaged_weights_of_one_rank(artifact: Path) -> None:
    (path,) = (artifact / "weights" / "rank2").iterdir()
    intact = path.read_bytes()
    path.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    try:
        with pytest.raises(LlmcError) as failed:
            LLM(artifact, threads=1)
    finally:
        path.write_bytes(intact)
    assert failed.value.code == "E107" and failed.value.cause.startswith("rank 2: ")
    assert ranks_of(os.getpid()) == []
