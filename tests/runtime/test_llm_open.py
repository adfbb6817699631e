"""LLM on an artifact that is opened, loaded and run: limits, capacity, errors and log lines."""

from __future__ import annotations

import gc
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import textkit
from artifact import tiny
from llmc_runtime import LLM, LlmcError, SamplingParams
from llmc_runtime.artifact import open_artifact
from llmc_runtime.device.cpu_device import CpuDevice
from llmc_runtime.engine.loader import open_device
from llmc_runtime.exec.buffer_layout import need_of
from llmc_runtime.format.expr import parse as parse_size
from llmc_runtime.format.manifest import RECURRENT, State

from llmc.artifact.write import write_artifact

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def quiet(path: Path, **options: Any) -> LLM:
    return LLM(path, say=lambda line: None, **options)


def continued(ids: list[int], count: int) -> list[int]:
    start = len(ids)
    while len(ids) < start + count:
        ids = [*ids, tiny.expected(ids, ids[start:].count(1))]
    return ids[start:]


def test_the_artifact_runs_and_its_capacity_is_said_first(toy: Path) -> None:
    messages: list[str] = []
    with LLM(toy, say=messages.append, kv_cache_memory_bytes=16 * 10) as llm:
        capacity = "cpu:test, KV cache: 40 tokens in 10 pages of 4 (160 B), 1.2 sequences of 32"
        assert messages == [f"opening {toy}", capacity]
        assert llm.model == str(toy)
        prompts = ["abc", "hello you", [5, 6, 7]]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        for output in outputs:
            assert output.outputs[0].token_ids == continued(output.prompt_token_ids, 5)
        assert llm.get_tokenizer().encode("abc") == outputs[0].prompt_token_ids


@pytest.mark.usefixtures("freezes")
def test_an_open_llm_spares_garbage_collections_what_exists(toy: Path) -> None:
    before = gc.get_freeze_count()
    with quiet(toy) as llm:
        assert gc.get_freeze_count() > before
        gc.collect()
        assert len(gc.get_objects()) < gc.get_freeze_count()
        assert llm.generate("abc", GREEDY, use_tqdm=False)[0].finished
        quiet(toy).close()
        assert gc.get_freeze_count() > before, "for the one that is still open"
    assert gc.get_freeze_count() == 0


def test_a_caller_may_ask_for_less_than_was_compiled_and_not_for_more(toy: Path) -> None:
    with quiet(toy, max_num_seqs=1, max_num_batched_tokens=2, max_model_len=16) as llm:
        config = llm.config
        assert (config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) == (1, 2, 16)
        output = llm.generate([[5, 6, 7]] * 3, GREEDY, use_tqdm=False)
        assert all(o.outputs[0].token_ids == continued([5, 6, 7], 5) for o in output)
    for name, value in (
        ("max_num_seqs", 5),
        ("max_num_batched_tokens", 49),
        ("max_model_len", 33),
        ("max_num_seqs", 0),
    ):
        with pytest.raises(LlmcError, match=f"{name} = {value}; the artifact was compiled for 1 to") as e:
            quiet(toy, **{name: value})
        assert e.value.code == "E204"


@pytest.mark.parametrize(
    ("method", "option"), [("ngram:3", "--speculate 3"), ("draft:3", "--draft MODEL --speculate 3")]
)
def test_an_artifact_without_drafts_says_how_to_compile_one(toy: Path, method: str, option: str) -> None:
    with pytest.raises(LlmcError, match=f"E204.*\n.*compile again with {option}, or start without"):
        quiet(toy, speculate=method)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"threads": 0}, "E201"), ({"threads": -1}, "E201"), ({"threads": "2"}, "E201"), ({"threads": 1.5}, "E201"),
        ({"threads": True}, "E201"), ({"kv_cache_memory_bytes": 1e6}, "E201"), ({"max_num_seqs": True}, "E204"),
        ({"kv_cache_memory_bytes": float("nan")}, "E201"), ({"kv_cache_memory_bytes": "1G"}, "E201"),
        ({"kv_cache_memory_bytes": -5}, "E202"), ({"kv_cache_memory_bytes": 0}, "E202"),
        ({"max_num_seqs": "3"}, "E204"), ({"threads": 1025}, "E201"),
        ({"seed": "x"}, "E201"), ({"seed": 1 << 64}, "E201"), ({"seed": True}, "E201"),
    ],
)  # fmt: skip
def test_sizes_that_are_none_are_refused(toy: Path, options: dict[str, Any], code: str) -> None:
    with pytest.raises(LlmcError) as e:
        quiet(toy, **options)
    assert e.value.code == code and len(str(e.value).splitlines()) == 2


def test_numpy_sizes_are_sizes(toy: Path) -> None:
    with quiet(toy, kv_cache_memory_bytes=np.int64(160), max_num_seqs=np.int32(2), threads=np.int64(1)) as llm:
        assert (llm.config.num_pages, llm.config.max_num_seqs) == (10, 2)


def test_a_path_may_have_any_bytes(toy: Path, tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/sp ace \xc3\xa9 \xff"))
    shutil.copytree(toy, path)
    with quiet(path) as llm:
        assert len(llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 5
    with pytest.raises(LlmcError, match=r"E101: x.* cannot be opened: File name too long"):
        quiet(Path("x" * 5000))


def test_without_prefix_caching_nothing_is_found(toy: Path) -> None:
    for caching, found in ((True, 8), (False, 0)):
        with quiet(toy, enable_prefix_caching=caching) as llm:
            prompt = list(range(4, 14))
            llm.generate(prompt, GREEDY, use_tqdm=False)
            assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == found


def test_models_with_recurrent_layers_reuse_prefixes_at_snapshots(tmp_path: Path) -> None:
    """The start says how many there are, or that prefixes are not reused; their states take memory, too."""
    files = textkit.write_folder(tmp_path / "t", textkit.small(), {"eos_token": "B", "bos_token": None})
    plain = replace(tiny.parts(tmp_path), tokenizer=sorted(files.iterdir()))
    state = State("row.memory.0", "f32", tuple(parse_size(n) for n in ("4", "3", "8", "8")), RECURRENT)
    write_artifact(tmp_path / "a.llmc", replace(plain, states=(*plain.states, state)))
    said: list[str] = []
    for more, words, found in (
        ({}, "8 state snapshots (6.0 KiB)", 8), ({"state_snapshots": 3}, "3 state snapshots", 8),
        ({"state_snapshots": 0}, "no prefix caching", 0), ({"enable_prefix_caching": False}, "no prefix caching", 0),
    ):  # fmt: skip
        said.clear()
        with LLM(tmp_path / "a.llmc", say=said.append, **more) as llm:
            assert any(words in line for line in said), (more, said)
            for cached in (0, found):
                assert llm.generate(list(range(4, 14)), GREEDY, use_tqdm=False)[0].num_cached_tokens == cached
    with pytest.raises(LlmcError, match=r"E204: enable_prefix_caching: .* recurrent layers(?s:.*)leave"):
        quiet(tmp_path / "a.llmc", enable_prefix_caching=True, state_snapshots=0)
    with pytest.raises(LlmcError, match=r"E205: 1048576 state snapshots need(?s:.*)--state-snapshots"):
        big = replace(state, shape=tuple(parse_size(n) for n in ("4", "64", "64", "1024")))
        write_artifact(tmp_path / "big.llmc", replace(plain, states=(*plain.states, big)))
        quiet(tmp_path / "big.llmc", state_snapshots=1 << 20)
    write_artifact(tmp_path / "plain.llmc", plain)
    with pytest.raises(LlmcError, match="E204: state_snapshots = 2, and the model has no recurrent layers"):
        quiet(tmp_path / "plain.llmc", state_snapshots=2)
    with_states, without = (need_of(open_artifact(tmp_path / f"{name}.llmc")).states for name in ("a", "plain"))
    assert with_states - without >= 4 * 3 * 8 * 8 * 4


def test_the_tokenizers_end_token_ends_a_text_beside_the_manifests(tmp_path: Path) -> None:
    """The toy's manifest names id 0; the tokenizer of this one calls "B" its end."""
    files = textkit.write_folder(tmp_path / "t", textkit.small(), {"eos_token": "B", "bos_token": None})
    parts = replace(tiny.parts(tmp_path), tokenizer=sorted(files.iterdir()))
    write_artifact(tmp_path / "a.llmc", parts)
    with quiet(tmp_path / "a.llmc") as llm:
        assert llm.config.eos_token_ids == (0, llm.get_tokenizer().token_id("B"))


def test_generation_defaults_of_the_artifact_are_used(toy: Path) -> None:
    with quiet(toy) as llm:
        assert llm.get_default_sampling_params().temperature == 0.0
        assert llm.generate("abc", use_tqdm=False)[0].outputs[0].token_ids


def test_without_tokenizer_files_ids_work(mute: Path) -> None:
    with quiet(mute) as llm:
        assert llm.generate([5, 6], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == continued([5, 6], 5)


def test_a_changed_weight_is_noticed_unless_verification_is_off(toy: Path, tmp_path: Path) -> None:
    shutil.copytree(toy, tmp_path / "bad.llmc")
    weights = next((tmp_path / "bad.llmc" / "weights").iterdir())
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(LlmcError) as e:
        quiet(tmp_path / "bad.llmc")
    assert e.value.code.startswith("E1")
    quiet(tmp_path / "bad.llmc", verify=False).close()


def test_an_artifact_of_a_device_that_this_runtime_lacks_is_refused(toy: Path) -> None:
    artifact = open_artifact(toy)
    target = replace(artifact.manifest.target, name="tpu:v9")
    other = replace(artifact, manifest=replace(artifact.manifest, target=target))
    with pytest.raises(LlmcError, match="no device of that kind"):
        open_device(other, None)


def test_an_llm_without_references_releases_its_device(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(CpuDevice, "close", lambda self: closed.append(self.name))
    llm = quiet(toy)
    stream = llm.stream([5, 6, 7], GREEDY)
    del llm
    assert len(list(stream)) == 5 and not closed
    del stream
    gc.collect()
    assert closed == ["cpu"]
