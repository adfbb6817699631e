"""Damaged model folders: configs, generation defaults, links that lead out, checkpoints that are not the model's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from corpus.damage import NASTY, changed, damaged, flipped
from corpus.headers import DEVICES, FILE, exit_code_of
from corpus.judge import Case

from llmc.frontend.model_folder import TOKENIZER_FILES, open_source

ANOTHER = "it is another model, and no checkpoint is there to differ"
LINK = "its bytes are those of a model, wherever they lie"
SMALL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "float32", "head_dim": 16, "attention_bias": False,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                        "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip
GENERATION = {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20}
LARGE = {
    "num_hidden_layers": (5000, 10**9, 10**18), "hidden_size": (1 << 22, 1 << 40, 1 << 62), "vocab_size": (1 << 40,),
    "intermediate_size": (1 << 50,), "num_attention_heads": (1 << 30,), "head_dim": (1 << 30, 1 << 40),
    "max_position_embeddings": (1 << 40, 10**18), "num_key_value_heads": (1 << 30,),
}  # fmt: skip


def links(rng: Random) -> Iterator[Case]:
    """Small files of a model folder that are links, devices or folders; read by what looks at a folder first."""

    def case(name: str, harm: Callable[[Path], Any], harmless: str = "", names: str = "") -> Case:
        def act(folder: Path) -> int:
            model = folder / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(SMALL))
            (model / "generation_config.json").write_text(json.dumps(GENERATION))
            harm(model)
            return exit_code_of(lambda: open_source(model))

        return Case("links", name, act, harmless, names)

    for name in TOKENIZER_FILES:
        for what, make in DEVICES.items():
            unread = what in ("is empty", "has zeros alone") and name not in ("config.json", "generation_config.json")
            harmless = "a compile looks into it later" if unread else ""
            yield case(f"{name} {what}", lambda f, n=name, m=make: ((f / n).unlink(True), m(f / n)), harmless, name)
        yield case(f"{name} is of 3 GB", lambda f, n=name: _sized(f / n, 3 << 30), "", name)

        def inside(f: Path, name: str = name) -> None:
            (f / name).unlink(True)
            (f / "real").write_text("{}" if name != "config.json" else json.dumps(SMALL))
            (f / name).symlink_to("real")

        def cached(f: Path, name: str = name) -> None:
            (f.parent / "blobs").mkdir()
            snapshot = f.parent / "snapshots" / ("0" * 40)
            snapshot.mkdir(parents=True)
            inside(f, name)
            (f / "real").rename(f.parent / "blobs" / "0123")
            (f / name).unlink()
            for path in f.iterdir():
                path.rename(snapshot / path.name)
            (snapshot / name).symlink_to("../../blobs/0123")
            f.rmdir()
            f.symlink_to(snapshot)

        yield case(f"{name} links to a file beside it", inside, LINK)
        yield case(f"{name} links to a blob of a hub's cache", cached, LINK)
    yield case("the folder is a link", lambda f: (f.rename(f.parent / "x"), f.symlink_to("x")), LINK)
    yield case("the folder is a link to itself", lambda f: (shutil.rmtree(f), f.symlink_to(f.name)))
    yield case("the folder is a pipe", lambda f: (shutil.rmtree(f), os.mkfifo(f)))
    yield case(
        "a folder of 100000 files", lambda f: [os.link(f / "config.json", f / f"{i}") for i in range(20000)], LINK
    )


def _sized(path: Path, size: int) -> None:
    path.touch()
    os.truncate(path, size)


def configs(folder: Path, rng: Random, count: int) -> Iterator[Case]:
    """One changed field, changed bytes, impossible sizes: the model is traced and checked against the checkpoint."""
    from models.cases import Case as Model
    from models.kit import save

    from llmc.frontend.trace_model import trace

    model = folder / "model"
    save(Model("small", "llama", {k: v for k, v in SMALL.items() if k not in ("model_type", "architectures")}), model)
    (model / "config.json").write_text(json.dumps(SMALL))
    (model / "generation_config.json").write_text(json.dumps(GENERATION))
    trace(model)  # what is imported late is imported now
    text = (model / "config.json").read_bytes()
    for key, values in LARGE.items():
        for value in values:
            yield _config(model, f"{key} = {value}", json.dumps(SMALL | {key: value}).encode())
    for key in SMALL:
        for value in rng.sample(NASTY, max(1, count // 60)):
            yield _config(model, f"{key} = {value!r:.40}", json.dumps(SMALL | {key: value}).encode())
    for i in range(count):
        doc, words = changed(SMALL, rng)
        yield _config(model, words, json.dumps(doc).encode())
        bad, words = (flipped if i % 2 else damaged)(text, rng)
        yield _config(model, words, bad)
        doc, words = changed(GENERATION, rng)
        yield _config(model, words, json.dumps(doc).encode(), "generation_config.json")
    yield from _others(folder, rng, count // 3)
    for size in range(rng.randrange(20), len(text), max(1, len(text) * 4 // count)):
        yield _config(model, f"cut to {size}", text[:size])
    yield from _checkpoints(model, rng, count)


def _others(folder: Path, rng: Random, count: int) -> Iterator[Case]:
    """Configs of other architectures: a config inside another, experts, latent attention, names of their own."""
    from models.cases import FURTHER, LISTED, ROPES, UNLISTED

    every = {c.name: c for c in (*LISTED, *UNLISTED, *ROPES, *FURTHER)}
    for name in ("gemma3", "mixtral", "deepseek_v3", "gpt2", "phi3-longrope", "gpt_oss"):
        case = every.get(name)
        if case is None:
            continue
        doc = {"model_type": case.model_type, **case.config}
        for _ in range(count):
            bad, words = changed(doc, rng)
            yield _config(folder / "none", f"{name}, {words}", json.dumps(bad).encode())


def _config(model: Path, words: str, bad: bytes, name: str = "config.json") -> Case:
    from llmc.frontend.checkpoint import Checkpoint
    from llmc.frontend.trace_model import trace

    def act(folder: Path) -> int:
        for path in model.iterdir() if model.exists() else ():
            if path.name != name:
                os.link(path, folder / path.name)
        (folder / name).write_bytes(bad)
        return exit_code_of(lambda: Checkpoint(trace(folder)).close() if model.exists() else trace(folder))

    return Case("configs", f"{name}: {words}", act, ANOTHER)


def _checkpoints(model: Path, rng: Random, count: int) -> Iterator[Case]:
    """The header of the weights changed, under a model that is right."""
    from llmc.frontend.trace_model import trace

    traced = trace(model)
    data = (model / FILE).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for i in range(count):
        if i % 2:
            doc, words = changed(header, rng)
            text = json.dumps(doc).encode()
            bad = len(text).to_bytes(8, "little") + text + data[8 + size :]
        else:
            head, words = damaged(data[: 8 + size], rng)
            bad = head + data[8 + size :]
        yield Case("configs", f"{FILE}: {words}", partial(_read, traced, bad), "what is read has the model's form")


def _read(traced: Any, bad: bytes, folder: Path) -> int:
    from llmc.frontend.checkpoint import Checkpoint

    (folder / FILE).write_bytes(bad)

    def read() -> None:
        with Checkpoint(traced, folder) as checkpoint:
            for name in checkpoint.names:
                checkpoint.read(name)

    return exit_code_of(read)
