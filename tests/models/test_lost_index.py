"""Numbered weight files without the index that names them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from models.cases import LISTED
from models.kit import fails, save
from safetensors.numpy import load_file, save_file

from llmc.console import Quiet
from llmc.dry_run import dry_run
from llmc.frontend.checkpoint import Checkpoint
from llmc.frontend.trace_model import Traced, trace
from llmc.frontend.weight_shards import missing_shards, numbered_shards
from llmc.options import Options

INDEX = "model.safetensors.index.json"


def shard(number: int, count: int) -> str:
    return f"model-{number:05}-of-{count:05}.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    folder = tmp_path_factory.mktemp("whole")
    save(next(case for case in LISTED if case.name == "llama"), folder, max_shard_size="60KB")
    return trace(folder)


@pytest.fixture
def folder(whole: Traced, tmp_path: Path) -> Path:
    """The checkpoint without its index."""
    copy = Path(shutil.copytree(whole.source.folder, tmp_path / "model"))
    (copy / INDEX).unlink()
    return copy


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_all_files_are_read(whole: Traced, folder: Path) -> None:
    assert len(files(folder)) > 2
    with Checkpoint(whole, folder) as found, Checkpoint(whole) as wanted:
        assert found.names == wanted.names
        for name in found.names:
            np.testing.assert_array_equal(found.read(name), wanted.read(name))
    options = Options(target="cpu:portable", max_num_seqs=2, max_num_batched_tokens=16, cache=None)
    planned = [dry_run(f, options, None, Quiet())["memory"] for f in (folder, whole.source.folder)]
    assert planned[0] == planned[1]


def test_a_missing_file_is_named(whole: Traced, folder: Path) -> None:
    lost = files(folder)[1]
    lost.unlink()
    fails("E320", "1 are missing", lost.name, do=lambda: Checkpoint(whole, folder))


def test_a_file_of_another_set_is_not_read(whole: Traced, folder: Path) -> None:
    """An incomplete set next to a complete one, as of another revision, is ignored; two complete ones are refused."""
    save_file({"unknown": np.ones(3, np.float32)}, folder / shard(1, 2))
    Checkpoint(whole, folder).close()
    save_file({"unknown": np.ones(3, np.float32)}, folder / shard(2, 2))
    fails("E320", INDEX, do=lambda: Checkpoint(whole, folder))


def test_a_tensor_in_two_files(whole: Traced, folder: Path) -> None:
    first, second = files(folder)[:2]
    name, values = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: values}, second)
    Checkpoint(whole, folder).close()
    save_file({**load_file(second), name: values + 1}, second)
    fails("E322", name, first.name, second.name, "differ", do=lambda: Checkpoint(whole, folder))


def test_an_index_outranks_numbers(whole: Traced, folder: Path) -> None:
    """Files that an index does not name are not read, whatever their names."""
    first = files(folder)[0]
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(load_file(first), first.name)}))
    fails("E323", "lacks tensors", do=lambda: Checkpoint(whole, folder))


@pytest.mark.parametrize(
    ("names", "complete", "missing"),
    [
        ([], [], []),
        ([shard(1, 1)], [shard(1, 1)], []),
        ([shard(2, 2), shard(1, 2), "other.safetensors"], [shard(1, 2), shard(2, 2)], []),
        ([shard(2, 3)], [], [shard(1, 3), shard(3, 3)]),
        ([shard(0, 1)], [], []),
        ([shard(3, 2), shard(1, 2)], [], [shard(2, 2)]),
        ([shard(1, 1), shard(1, 2), shard(2, 2)], [], []),
        (["model-00001-of-00001.safetensors.bak", "xmodel-00001-of-00001.safetensors"], [], []),
        (["model-١0001-of-00001.safetensors"], [], []),
    ],
)
def test_sets_of_numbers(names: Iterable[str], complete: list[str], missing: list[str]) -> None:
    assert numbered_shards(names) == complete
    assert missing_shards(names) == missing
