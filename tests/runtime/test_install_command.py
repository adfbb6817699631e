"""Errors about packages that are missing name a pip command that works for this installation."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from llmc_runtime.format import install_command
from llmc_runtime.format.errors import EXTRAS, missing_extra

ROOT = Path(__file__).resolve().parents[2]


def test_the_name_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == install_command.DISTRIBUTION
    assert set(EXTRAS) <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (None, "'llmc-aot[serve]'"),
        ({"url": "https://host/llmc.git", "vcs_info": {"vcs": "git", "commit_id": "0"}}, "'llmc-aot[serve]'"),
        ({"url": "file:///src/my%20llmc", "dir_info": {"editable": True}}, "-e '/src/my llmc[serve]'"),
        ({"url": "file:///src/llmc", "dir_info": {}}, "'/src/llmc[serve]'"),
        ({"url": "file:///w/llmc_aot-0.1.0-py3-none-any.whl", "archive_info": {}},
         "'/w/llmc_aot-0.1.0-py3-none-any.whl[serve]'"),
    ],
)  # fmt: skip
def test_each_way_of_installing(record: dict | None, wanted: str) -> None:
    assert install_command.requirement("serve", json.dumps(record) if record else "") == wanted


def test_pip_is_named_if_it_is_the_one_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = str(Path(sys.executable).parent / "pip")
    monkeypatch.setattr("shutil.which", lambda name: beside)
    assert install_command.install_command("serve").startswith("pip install ")
    monkeypatch.setattr("shutil.which", lambda name: "/elsewhere/pip")
    assert install_command.install_command("serve").startswith(f"{sys.executable} -m pip install ")


def test_a_checkout_that_is_gone_is_not_named_as_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    origin = json.dumps({"url": (tmp_path / "src").as_uri(), "dir_info": {}})
    monkeypatch.setattr(install_command, "_origin", lambda: origin)
    command = install_command.install_command("serve", "grammar")
    assert f" install '.[serve,grammar]' in a clone (llmc was installed from {tmp_path}/src, which is gone)" in command
    (tmp_path / "src").mkdir()
    assert install_command.install_command("serve").endswith(f" install '{tmp_path}/src[serve]'")


def test_every_package_that_an_extra_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    error = missing_extra("transformers")
    assert error is not None and f"({', '.join(EXTRAS['compile'])} missing)" in error.cause


def test_each_module_of_an_extra_names_its_extra() -> None:
    for extra, modules in EXTRAS.items():
        for module in modules:
            error = missing_extra(module)
            assert error is not None and f"[{extra}]'" in error.remedy
