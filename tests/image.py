"""Builds the image of examples/deploy/Dockerfile and runs it as compose.yaml does. A program, not a test.

    python tests/image.py ARTIFACT

The builder is podman or docker, and docker only with its daemon running; without either, the program reports that and
ends. If no registry of images can be reached, the base image is made from Debian's packages (mmdebstrap), with Debian's
Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "examples" / "deploy"
ROOM = ROOT / "build" / "image"
CERTIFICATES = Path("/etc/ssl/certs")
KEY = "key-of-the-image-test"
LIMIT = 60.0  # seconds until the server answers
# Runs in the container, which has no network but its own loopback interface.
CLIENT = """
import json, sys, urllib.error, urllib.request
path, key, body = sys.argv[1:4]
headers = {"content-type": "application/json"} | ({"authorization": "Bearer " + key} if key else {})
request = urllib.request.Request("http://127.0.0.1:8000" + path, body.encode() or None, headers)
try:
    with urllib.request.urlopen(request, timeout=30) as reply:
        print(json.dumps([reply.status, reply.read().decode()]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, error.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


def engine() -> list[str]:
    """The command of a builder that works here, with its own storage in build/image for podman; [] if none does.

    The client of docker builds nothing without its daemon.
    """
    if shutil.which("podman"):
        runtime = ["--runtime", "runc"] if shutil.which("runc") else []
        storage = ["--root", str(ROOM / "storage"), "--runroot", str(ROOM / "run")]
        return ["podman", "--cgroup-manager", "cgroupfs", *runtime, *storage]
    daemon = shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0
    return ["docker"] if daemon else []


def call(*command: str, check: bool = True) -> str:
    """The standard output of a command; its errors are shown."""
    return subprocess.run(command, check=check, stdout=subprocess.PIPE, text=True).stdout.strip()


def published_base() -> str:
    """The base image that the Dockerfile names."""
    text = (DEPLOY / "Dockerfile").read_text()
    return text.split("ARG BASE=", 1)[1].split("\n", 1)[0]


def base_image(builder: list[str]) -> str:
    """The published base image, or one that is made here of Debian's packages."""
    name = published_base()
    if subprocess.run([*builder, "pull", "-q", f"docker.io/library/{name}"], capture_output=True).returncode == 0:
        return name
    if not shutil.which("mmdebstrap"):
        sys.exit(f"{name} cannot be pulled, and mmdebstrap is not installed. Try: apt-get install mmdebstrap")
    print(f"  {name} cannot be pulled: the base image is Debian's Python", flush=True)
    archive = ROOM / "debian.tar"
    if not archive.exists():
        packages = "--include=python3,python3-pip,python-is-python3,ca-certificates"
        sources = [str(p) for p in Path("/etc/apt/sources.list.d").glob("debian.sources")] or ["/etc/apt/sources.list"]
        partial = archive.with_suffix(".part.tar")
        call("mmdebstrap", "--quiet", "--variant=apt", packages, "bookworm", str(partial), *sources)
        partial.rename(archive)
    # Debian's pip installs into a virtual environment only, unless it is allowed to do otherwise.
    call(*builder, "import", "-q", "--change", "ENV PIP_BREAK_SYSTEM_PACKAGES=1", str(archive), "llmc-base")
    return "localhost/llmc-base" if builder[0] == "podman" else "llmc-base"


def build(builder: list[str]) -> None:
    """Build the image; podman's build trusts the certificates that this machine trusts."""
    base = base_image(builder)
    trust = []
    if builder[0] == "podman" and CERTIFICATES.is_dir():
        settings = ROOM / "pip.conf"
        settings.write_text(f"[global]\ncert = {CERTIFICATES}/ca-certificates.crt\n")
        trust = ["-v", f"{CERTIFICATES}:{CERTIFICATES}:ro", "-v", f"{settings}:/etc/pip.conf:ro"]
        trust += ["--network", "host", "--isolation", "chroot"]
    file = str(DEPLOY / "Dockerfile")
    call(*builder, "build", "-q", *trust, "-f", file, "--build-arg", f"BASE={base}", "-t", "llmc-serve", str(ROOT))


def run_options(service: dict[str, Any], models: Path, keys: Path) -> list[str]:
    """The options of `run` that the service of compose.yaml stands for."""
    options = ["--read-only"] * service["read_only"]
    options += [f"--tmpfs={folder}" for folder in service["tmpfs"]]
    options += [f"--cap-drop={name.lower()}" for name in service["cap_drop"]]
    options += [f"--security-opt={name.removesuffix(':true')}" for name in service["security_opt"]]
    (mount,) = service["volumes"]
    assert mount == "../../models:/models:ro", mount
    assert service["secrets"] == ["llmc-keys"]
    options += ["-v", f"{models}:/models:ro", "-v", f"{keys}:/run/secrets/llmc-keys:ro"]
    # An engine without the privilege to raise limits fails at those that it sets by default.
    return [*options, "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]


@contextmanager
def running(builder: list[str], artifact: Path) -> Iterator[str]:
    """A container of the image with the command, the options and the secret of compose.yaml; its name."""
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["llmc"]
    name = f"llmc-image-{os.getpid()}"
    with tempfile.TemporaryDirectory(dir=ROOM) as folder:
        models, keys = Path(folder) / "models", Path(folder) / "keys.txt"
        shutil.copytree(artifact, models / "model.llmc")
        for path in (Path(folder), models):
            path.chmod(0o755)
        keys.write_text(KEY + "\n")
        options = run_options(service, models, keys)
        call(*builder, "run", "-d", "--network=none", f"--name={name}", *options, "llmc-serve", *service["command"])
        try:
            yield name
        finally:
            call(*builder, "rm", "-f", name, check=False)


def check(builder: list[str], name: str) -> None:
    """Requests with and without a key, the health check of compose.yaml, what is not in the image, the end."""
    inside = [*builder, "exec", name]
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["llmc"]

    def ask(path: str, key: str = "", body: str = "") -> tuple[int, str]:
        status, text = json.loads(call(*inside, "python", "-c", CLIENT, path, key, body))
        return status, text

    start = time.monotonic()
    while (status := ask("/health", KEY)[0]) != 200:
        if time.monotonic() - start > LIMIT:
            sys.exit(f"the server did not answer within {LIMIT:.0f} s: {status}\n{call(*builder, 'logs', name)}")
        time.sleep(0.2)
    kind, *health = service["healthcheck"]["test"]
    assert kind == "CMD" and subprocess.run([*inside, *health]).returncode == 0, health
    prompt = json.dumps({"prompt": "Once upon a time", "max_tokens": 8})
    assert ask("/v1/completions", "", prompt)[0] == 401
    status, text = ask("/v1/completions", KEY, prompt)
    assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 8, text
    status, text = ask("/metrics")
    assert status == 200 and "llmc:generation_tokens_total" in text, text
    assert call(*inside, "id", "-u") != "0"
    missing = "import importlib.util as u; print([n for n in ('torch', 'triton', 'transformers') if u.find_spec(n)])"
    assert call(*inside, "python", "-c", missing) == "[]"
    start = time.monotonic()
    call(*builder, "stop", "-t", service["stop_grace_period"].removesuffix("s"), name)
    ended = call(*builder, "inspect", "--format", "{{.State.ExitCode}}", name)
    assert ended == "0", f"the server ended with {ended}"
    print(f"  completions, metrics, health, keys, user; it ended {time.monotonic() - start:.1f} s after SIGTERM")


def main() -> None:
    if len(sys.argv) != 2 or not (artifact := Path(sys.argv[1])).is_dir():
        sys.exit(__doc__)
    builder = engine()
    if not builder:
        print("  neither podman nor a running docker daemon was found: the image was not built")
        return
    ROOM.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    build(builder)
    size = int(call(*builder, "image", "inspect", "--format", "{{.Size}}", "llmc-serve"))
    print(f"  {builder[0]} built llmc-serve, {size / 1e6:.0f} MB, in {time.monotonic() - start:.0f} s", flush=True)
    with running(builder, artifact) as name:
        check(builder, name)


if __name__ == "__main__":
    main()
