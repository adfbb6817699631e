"""Malicious models, artifacts and caches cannot execute code, load pickles, access other paths or change data.

`llmc` and `llmc-run` are run as processes, watched by an audit hook. tests/corpus has damaged inputs of all kinds.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest
from corpus.artifacts import files_of, toy
from models.hub_stand_in import HubStandIn, answer

from tests.attacks.target import ROOT, Target, leaks, python_path, target

MODEL = ROOT / "examples" / "demo-model"
RUN = "import sys; from llmc_runtime.cli import main_run; sys.exit(main_run())"
SERVE = "import sys; from llmc_runtime.cli import main_serve; sys.exit(main_serve())"
# Loaded by every Python process that finds it: who unpickles, or reads marshalled code of no module, is on record.
HOOK = """
import os, sys

def report(what):
    with open(os.environ["ATTACK_AUDIT"], "a") as file:
        file.write(what + "\\n")

def hook(event, args):
    if event == "pickle.find_class" or event.startswith("marshal.load"):
        by = sys._getframe(1).f_code.co_filename
        if not by.startswith("<frozen importlib"):
            report(f"{event} {args!r:.80} by {by}")

sys.addaudithook(hook)
report("watched")
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one with kernels, programs, weights, a tokenizer, a template and a canary."""
    return toy(tmp_path_factory.mktemp("artifact"))


@pytest.fixture
def audit(tmp_path: Path) -> tuple[dict[str, str], Callable[[], tuple[int, list[str]]]]:
    """Return an environment that watches processes, and a function that returns their number and forbidden acts."""
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    file = tmp_path / "audit"
    file.touch()

    def seen() -> tuple[int, list[str]]:
        lines = file.read_text().splitlines()
        return lines.count("watched"), [line for line in lines if line != "watched"]

    path = os.pathsep.join((str(tmp_path / "hook"), python_path()))
    return {**os.environ, "PYTHONPATH": path, "ATTACK_AUDIT": str(file)}, seen


def command(*words: str, env: dict[str, str] | None = None, seconds: float = 300) -> tuple[int, str]:
    """Run a Python process; return its exit code and output."""
    env = env or {**os.environ, "PYTHONPATH": python_path(), "HF_HUB_OFFLINE": "0"}  # fixtures' modules set it
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=seconds, check=False
    )
    return done.returncode, done.stdout + done.stderr


def generate(path: Path, *more: str, **options: Any) -> tuple[int, str]:
    """Two tokens, by llmc-run."""
    return command("-c", RUN, str(path), "-p", "abc", "-n", "2", "-q", *more, **options)


def test_01_nothing_is_unpickled(artifact: Path, audit: Any, tmp_path: Path, full: bool) -> None:
    """No pickle or marshalled code while an artifact is run and served; at full strength, nor during a compile."""
    env, seen = audit
    assert generate(artifact, env=env)[0] == 0
    with target("--port", "0", program=("-c", SERVE, str(artifact)), environment=env) as server:
        assert server.ask("/v1/completions", {"prompt": "abc", "max_tokens": 3}).status == 200
    if full:
        out = str(tmp_path / "demo.llmc")
        code, output = command("-m", "llmc.cli", "compile", str(MODEL), "-o", out, "--no-cache", env=env)
        assert code == 0, output
    processes, hits = seen()
    ours = [hit for hit in hits if "torch/" not in hit and "torch\\" not in hit]
    assert processes >= 3 and ours == []
    assert full or hits == []
    command("-c", "import pickle; pickle.loads(pickle.dumps(print))", env=env)  # what the hook would see
    assert len(seen()[1]) == len(hits) + 1


class Canary:
    """Unpickling one makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_01_a_pickle_in_the_place_of_any_file_is_inert(
    artifact: Path, tmp_path: Path, draw: Random, full: bool
) -> None:  # fmt: skip
    """Each file of an artifact becomes a pickle that would leave a trace: refused, and no trace."""
    trace = tmp_path / "trace"
    data = pickle.dumps(Canary(trace))
    names = files_of(artifact)
    for name in names if full else draw.sample([n for n in names if not n.startswith(("report/", "ir/"))], 1):
        path = Path(shutil.copytree(artifact, tmp_path / "bad.llmc"))
        (path / name).write_bytes(data)
        code, output = generate(path)
        assert (code and "LLMC-E" in output) or name.startswith(("report/", "ir/", "canary")), (name, output)
        assert not trace.exists() and "Traceback" not in output, (name, output)
        shutil.rmtree(path)
    pickle.loads(data)  # what it would have done
    assert trace.exists()


TEMPLATES = (
    "{{ lipsum.__globals__['os'].mkdir('TRACE') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.mkdir('TRACE') }}",
    "{% for c in [].__class__.__base__.__subclasses__() %}x{% endfor %}",
    "{{ self.__init__.__globals__['__builtins__']['open']('TRACE', 'w') }}",
    "{% include '/etc/passwd' %}{{ messages }}",
    "{% import 'os' as os %}{{ os.mkdir('TRACE') }}", "{{ messages.append.__self__.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ ('%c' * 100000000) % 1 }}", "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}", "{{ messages|attr('__class__') }}", "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ strftime_now.__globals__['os'].mkdir('TRACE') }}", "{{ 10 ** 10 ** 10 }}",
    "{{ ''|format(messages.__class__) }}",
)  # fmt: skip


def test_13_hostile_templates_are_inert(tmp_path: Path, draw: Random, full: bool) -> None:
    """Templates that access the interpreter or files, or run without end: the request fails, or the server does not
    start; nothing is executed, and completions are unaffected."""
    trace = tmp_path / "trace"
    for template in TEMPLATES if full else draw.sample(TEMPLATES, 1):
        file = tmp_path / "template.jinja"
        file.write_text(template.replace("TRACE", str(trace)))
        with target("--chat-template", str(file)) as server:
            server.steady()
            reply = server.ask(
                "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            )
            assert reply.status in (200, 400), (template, reply)
            assert not leaks(reply.body.decode()) and "root:" not in reply.body.decode(), (template, reply)
            server.steady(template)
        assert not trace.exists(), template


def test_13_a_model_s_own_code_is_never_run(tmp_path: Path, full_only: None) -> None:
    """A folder whose config, tokenizer and files name their own code is compiled without it, or refused."""
    trace = tmp_path / "trace"
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    code = f"import os\nos.mkdir({str(trace)!r})\nclass M: pass\nclass C: pass\n"
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "setup.py", "conftest.py"):
        (model / name).write_text(code)
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(trace)))
    maps = {
        "AutoConfig": "configuration_x.C",
        "AutoModelForCausalLM": "modeling_x.M",
        "AutoTokenizer": ["tokenization_x.M", None],
    }
    for name in ("config.json", "tokenizer_config.json"):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | {"auto_map": maps}))
    code_of, output = command("-m", "llmc.cli", "compile", str(model), "-o", str(tmp_path / "x.llmc"), "--no-cache")
    assert code_of in (0, 1) and (code_of == 0 or "LLMC-E" in output), output
    config = json.loads((model / "config.json").read_text()) | {"model_type": "mine", "architectures": ["M"]}
    (model / "config.json").write_text(json.dumps(config))
    code_of, output = command("-m", "llmc.cli", "compile", str(model), "-o", str(tmp_path / "y.llmc"), "--dry-run")
    assert "Traceback" not in output and code_of == 1, output
    assert not trace.exists()


FIRST, SECOND = "1" * 40, "2" * 40
NAME = "someone/model"


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """A hub whose `main` moves once its commit was requested: its address, the first commit's files, the requests."""
    folders = {
        FIRST: Path(shutil.copytree(MODEL, tmp_path / "first")),
        SECOND: Path(shutil.copytree(MODEL, tmp_path / "second")),
    }
    (folders[SECOND] / "config.json").write_text('{"model_type": "moved"}')
    (folders[SECOND] / "tokenizer.json").write_text("{}")
    main, requests = [FIRST], list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(True)

        def do_HEAD(self) -> None:
            self.reply(False)

        def reply(self, body: bool) -> None:
            requests.append(self.path)
            named = next((commit for commit in folders if f"/{commit}" in self.path), main[0])
            hub = HubStandIn({NAME: folders[named]}, revisions=("main", FIRST, SECOND), sha=named)
            answer(self, hub, body)
            main[0] = SECOND

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", folders[FIRST], requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_14_a_revision_is_one_commit(moving: tuple[str, Path, list[str]], tmp_path: Path, full: bool) -> None:
    """A hub whose `main` moves during the download: every byte is that of the first commit, which is recorded."""
    url, first, requests = moving
    fetch = (
        "import sys; from pathlib import Path; from llmc.frontend.hub import Hub, locate; "
        "at = locate(sys.argv[1], Hub(sys.argv[2], Path(sys.argv[3]))); print(at.commit, at.folder)"
    )
    code, output = command("-c", fetch, f"{NAME}@main", url, str(tmp_path / "hub"))
    assert code == 0, output
    commit, _, folder = output.strip().splitlines()[-1].partition(" ")
    assert commit == FIRST and sum("/revision/main" in path for path in requests) == 1
    for file in Path(folder).iterdir():
        assert file.read_bytes() == (first / file.name).read_bytes(), file.name
    assert {f"/{FIRST}/" in path for path in requests if "/resolve/" in path} == {True}
    if full:
        out = tmp_path / "x.llmc"
        more = ("--hub-endpoint", url, "--download-dir", str(tmp_path / "other"))
        code, output = command("-m", "llmc.cli", "compile", f"{NAME}@{FIRST}", "-o", str(out), "--no-cache", *more)
        assert code == 0 and FIRST in (out / "manifest.json").read_text(), output
        assert (out / "tokenizer" / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


def test_16_no_path_leads_outside(artifact: Path, server: Target, tmp_path: Path, draw: Random, full: bool) -> None:
    """Names of models that are paths, and artifacts whose files are links or lie elsewhere: not found, refused."""
    for name in (
        "../../../etc/passwd",
        "/etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "toy/../../x",
        "....//etc",
        "C:\\x",
        "toy\0",
        "~",
    ):
        assert server.ask("/v1/completions", {"prompt": "x", "model": name}).status == 404
        for path in (f"/v1/models/{name}", f"/v1/models/toy/{name}", f"/static/{name}", f"/{name}", f"/assets/{name}"):
            spelled = path.replace("\0", "%00").replace(" ", "%20").replace("\\", "%5c")
            reply = server.ask(spelled)
            assert reply.status in (400, 404) and b"root:" not in reply.body, (path, reply)
    manifest = (artifact / "manifest.json").read_text()
    names = [name for name in files_of(artifact) if name != "manifest.json" and f'"{name}"' in manifest]
    harms: list[tuple[str, Callable[[Path], object]]] = []
    for name in names:
        harms += [(f"{name} is a link", lambda p, n=name: ((p / n).unlink(), (p / n).symlink_to("/etc/passwd")))]
        harms += [(f"{name} is a pipe", lambda p, n=name: ((p / n).unlink(), os.mkfifo(p / n)))]
    for bad in ("/etc/passwd", "../../x", "a/../../x", "..", "x\\u0000y"):
        changed = manifest.replace('"tokenizer/tokenizer.json"', f'"{bad}"')
        harms += [(f"a file named {bad}", lambda p, text=changed: (p / "manifest.json").write_text(text))]
    for words, harm in harms if full else draw.sample(harms, 1):
        path = Path(shutil.copytree(artifact, tmp_path / "bad.llmc"))
        harm(path)
        code, output = generate(path, seconds=20)
        assert code == 1 and "LLMC-E" in output, (words, code, output)
        assert "root:" not in output and "Traceback" not in output, (words, output)
        shutil.rmtree(path)


def test_17_damaged_artifacts_are_refused(
    artifact: Path, tmp_path: Path, draw: Random, times: Callable[[int, int], int]
) -> None:
    """Bytes changed, cut and swapped in any file: a code and a remedy, soon, and never a crash."""
    names = [name for name in files_of(artifact) if not name.startswith(("report/", "ir/", "canary"))]
    for _ in range(times(2, 50)):
        path = Path(shutil.copytree(artifact, tmp_path / "bad.llmc"))
        file = path / draw.choice(names)
        data = bytearray(file.read_bytes())
        at = draw.randrange(len(data))
        if draw.random() < 0.5:
            data[at] ^= 1 << draw.randrange(8)
        else:
            del data[at:]
        file.write_bytes(data)
        code, output = generate(path, seconds=20)
        assert code in (1, 3) and "LLMC-E" in output and "Try:" in output and "Traceback" not in output, (
            file,
            at,
            code,
            output,
        )
        shutil.rmtree(path)
