"""Models by id, from a stand-in hub: pinned to a commit, only files of the allow-list, an error for each failure."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from models.cases import LISTED
from models.hub_stand_in import COMMIT, HubStandIn, serving
from models.kit import fails, save

from llmc.frontend.hub import Hub, locate
from llmc.frontend.model_folder import open_source

NAME = "someone/tiny-model.v2"
TEMPLATE = "additional_chat_templates/tool_use.jinja"
CODE = "raise SystemExit('this must not run')"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint among much that must never be fetched."""
    folder = tmp_path_factory.mktemp("repo")
    save(LISTED[0], folder, max_shard_size="60KB")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": True}))
    for name, text in (
        ("tokenizer.json", "{}"), ("chat_template.jinja", "{{ 1 }}"), ("README.md", "# tiny"), ("modeling_x.py", CODE),
        ("pytorch_model.bin", "pickle"), ("other.safetensors", "no shard"), ("training_args.bin", "pickle"),
        ("onnx/model.onnx", "onnx"), ("original/config.json", "{}"), ("onnx/model.safetensors", "another"),
        (TEMPLATE, "{{ 2 }}"), ("quantize_config.json", '{"bits": 4}'),
        ("additional_chat_templates/x.py", CODE), ("onnx/chat.jinja", "{{ 3 }}"),
    ):  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def hub(model: Path) -> Iterator[HubStandIn]:
    with serving(HubStandIn({NAME: model, "tiny": model})) as hub:
        yield hub


def shards(folder: Path) -> set[str]:
    return set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())


@pytest.mark.parametrize("id", [NAME, f"{NAME}@main", f"{NAME}@v1", f"{NAME}@{COMMIT}", "tiny@main"])
def test_a_revision_is_pinned_and_only_listed_files_are_downloaded(
    id: str, hub: HubStandIn, model: Path, tmp_path: Path
) -> None:
    at = locate(id, Hub(hub.url, tmp_path))
    assert (at.name, at.commit) == (id.partition("@")[0], COMMIT)
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
    wanted |= {"quantize_config.json"}
    wanted |= {"model.safetensors.index.json"} | shards(model)
    assert {p.name for p in at.folder.iterdir() if p.is_file()} == wanted
    carried = open_source(at.folder).tokenizer_files
    assert at.folder / TEMPLATE in carried and len(list(at.folder.glob("*/*"))) == 1
    wanted.add("tool_use.jinja")
    assert set(hub.files) == wanted and len(hub.files) == len(wanted)
    assert all(f"/resolve/{COMMIT}/" in a for a in hub.asked if "/resolve/" in a)


def test_numbered_shards_without_an_index_come(hub: HubStandIn, model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "model.safetensors.index.json").unlink()
    hub.repos["someone/numbered"] = copy
    at = locate("someone/numbered", Hub(hub.url, tmp_path))
    assert {p.name for p in at.folder.glob("*.safetensors")} == shards(model)
    (copy / max(shards(model))).unlink()
    words = "someone/numbered@main", "1 are missing", max(shards(model))
    fails("E320", *words, do=lambda: locate("someone/numbered", Hub(hub.url, tmp_path / "other")))


def test_weights_are_left_where_none_are_wanted(hub: HubStandIn, tmp_path: Path) -> None:
    at = locate(NAME, Hub(hub.url, tmp_path), weights=False)
    assert not list(at.folder.glob("*.safetensors*")) and (at.folder / "config.json").exists()


def test_offline(hub: HubStandIn, tmp_path: Path) -> None:
    fails("E332", NAME, "--offline", do=lambda: locate(NAME, Hub(hub.url, tmp_path, offline=True)))
    online = locate(NAME, Hub(hub.url, tmp_path))
    hub.asked.clear()
    for id in (NAME, f"{NAME}@{COMMIT}"):
        assert locate(id, Hub(hub.url, tmp_path, offline=True)) == online
    assert not hub.asked
    fails("E332", "v1", do=lambda: locate(f"{NAME}@v1", Hub(hub.url, tmp_path, offline=True)))


def test_refusals_of_a_hub(hub: HubStandIn, tmp_path: Path) -> None:
    at = Hub(hub.url, tmp_path)
    fails("E330", "someone/else", "owner/name", do=lambda: locate("someone/else", at))
    fails("E333", NAME, "'v9'", do=lambda: locate(f"{NAME}@v9", at))
    hub.gated.add(NAME)
    fails("E331", NAME, "gated", "token", do=lambda: locate(NAME, at))
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_an_unreachable_hub_is_reported(hub: HubStandIn, tmp_path: Path) -> None:
    fails("E332", "127.0.0.1:9", "--offline", do=lambda: locate(NAME, Hub("http://127.0.0.1:9", tmp_path)))


def test_answers_of_no_use(hub: HubStandIn, model: Path, tmp_path: Path) -> None:
    hub.sha = "main"
    fails("E334", "40 digits", do=lambda: locate(NAME, Hub(hub.url, tmp_path)))
    hub.sha = COMMIT
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    hub.repos["someone/broken"] = copy
    (copy / next(iter(shards(copy)))).unlink()
    fails("E334", "index", "not there", do=lambda: locate("someone/broken", Hub(hub.url, tmp_path)))


@pytest.mark.parametrize(
    ("names", "code", "words"),
    [
        (["model.gguf"], "E302", "GGUF"),
        (["adapter_config.json", "adapter_model.safetensors"], "E302", "adapter"),
        (["config.json", "pytorch_model.bin"], "E320", "pickled weights only"),
        (["config.json", "onnx/model.onnx"], "E320", "neither"),
    ],
)
def test_other_formats_are_reported_before_they_are_fetched(
    names: list[str], code: str, words: str, hub: HubStandIn, model: Path, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    for name in names:
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_bytes((model / "config.json").read_bytes())
    hub.repos["someone/other"] = repo
    fails(code, words, "someone/other@main", do=lambda: locate("someone/other", Hub(hub.url, tmp_path)))
    assert set(hub.files) <= {"config.json"}


def test_an_existing_folder_takes_precedence_over_an_id(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model.parent)
    shutil.copytree(model, Path("a/b"))
    assert locate("a/b", Hub("http://127.0.0.1:9")).commit == ""
    for none in ("nowhere", "some/../where@main", "a/b@../../x"):
        fails("E301", none, "owner/name", do=lambda none=none: locate(none, Hub("http://127.0.0.1:9")))
