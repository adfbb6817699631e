"""`llmc eval`: perplexity, agreement and KL divergence equal those that transformers computes on the same windows."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import textkit
import torch
from artifact import tiny
from kernel_cache import with_kernels
from llmc_runtime.api.llm import resolve
from llmc_runtime.exec.load_executor import load_executor
from llmc_runtime.exec.score_tokens import score_tokens
from llmc_runtime.format.errors import LlmcError
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.hashing import sha256
from llmc_runtime.format.manifest import FileInfo
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmc.artifact.amend import put_file
from llmc.artifact.write import write_artifact
from llmc.cli import main
from llmc.console import Quiet
from llmc.measure.eval_artifact import Settings, eval_artifact
from llmc.measure.eval_statistics import Distribution, kl_divergence
from llmc.measure.eval_text import read_pieces, survey, windows
from llmc.measure.verify_artifact import verify_artifact
from llmc.report.inspect import inspect_artifact, render

pytestmark = pytest.mark.drawn
DEMO = Path(__file__).resolve().parents[2] / "examples" / "demo-model-small"
CONTEXT = 45  # no multiple of the tokens of a step


class Kit(NamedTuple):
    """The small demonstration model in f32, the same with other weights, their artifacts, a cache, and a text."""

    model: Path
    changed: Path
    artifact: Path
    other: Path
    cache: Path
    text: Path

    def settings(self, **changes: Any) -> Settings:
        return Settings(**{"cache": self.cache, "context": CONTEXT, **changes})


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    folder = tmp_path_factory.mktemp("eval")
    cache = with_kernels(folder / "cache")
    model, changed = (_saved(folder / name, noise) for name, noise in (("model", 0.0), ("changed", 0.02)))
    options = {"target": "cpu:native", "max-num-seqs": "16", "max-num-batched-tokens": "32"}
    compiled = resolve(model, options, cache, lambda line: None)
    artifact, other = (Path(shutil.copytree(compiled, folder / f"{name}.llmc")) for name in ("model", "other"))
    assert main(["pack", str(other), str(changed)]) == 0
    text = folder / "readme.txt"
    text.write_text((DEMO / "README.md").read_text()[:4000])
    return Kit(model, changed, artifact, other, cache, text)


def _saved(folder: Path, noise: float) -> Path:
    """Save the demonstration model in f32, with noise added to its weights."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator) * weight.std()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    return folder


@pytest.fixture
def copied(kit: Kit, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kit.artifact, tmp_path / "copy.llmc"))


def logprobs_of(model: Path, text: str, context: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The next tokens of all windows, the log-probabilities of the vocabulary for each, and the tokens of the text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    size = context - 1
    rows = [[tokenizer.bos_token_id, *ids[i : i + size]] for i in range(0, len(ids) - size + 1, size)]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor(rows)).logits
    logprobs = torch.log_softmax(logits[:, :-1].double(), -1)
    return np.array([row[1:] for row in rows]).reshape(-1), logprobs.reshape(-1, logprobs.shape[-1]).numpy(), len(ids)


def test_perplexity_is_that_of_transformers(kit: Kit) -> None:
    found = eval_artifact(kit.artifact, kit.text, kit.settings(), Quiet())
    tokens, logprobs, count = logprobs_of(kit.model, kit.text.read_text(), CONTEXT)
    losses = -np.take_along_axis(logprobs, tokens[:, None], -1)[:, 0]
    assert found["tokens"] == len(losses) and found["windows"] == count // (CONTEXT - 1) >= 20
    assert found["nll"] == pytest.approx(losses.mean(), rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(losses.mean()), rel=1e-4)
    stderr = losses.std(ddof=1) / math.sqrt(len(losses))
    assert found["perplexity_stderr"] == pytest.approx(found["perplexity"] * stderr, rel=1e-4)
    bits = losses.mean() / math.log(2) * count / kit.text.stat().st_size
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-5) and found["against"] is None


def test_differences_are_those_of_transformers(kit: Kit) -> None:
    """Against a model with other weights, over the whole vocabulary."""
    found = eval_artifact(kit.other, kit.text, kit.settings(against=str(kit.artifact)), Quiet())
    against = found["against"]
    tokens, ours, _ = logprobs_of(kit.changed, kit.text.read_text(), CONTEXT)
    _, theirs, _ = logprobs_of(kit.model, kit.text.read_text(), CONTEXT)
    kl = (np.exp(theirs) * (theirs - ours)).sum(-1)
    assert against["kl_mean"] == pytest.approx(kl.mean(), rel=1e-3) and kl.mean() > 1e-4
    assert against["kl_stderr"] == pytest.approx(kl.std(ddof=1) / math.sqrt(len(kl)), rel=1e-3)
    assert against["kl_p99"] == pytest.approx(np.percentile(kl, 99, method="inverted_cdf"), rel=0.01)
    assert against["kl_max"] == pytest.approx(kl.max(), rel=1e-3)
    agreed = 100 * (ours.argmax(-1) == theirs.argmax(-1)).mean()
    assert against["top1_agreement_percent"] == pytest.approx(agreed, abs=0.2) and agreed < 100
    losses = [-np.take_along_axis(x, tokens[:, None], -1).mean() for x in (ours, theirs)]
    change = 100 * (math.exp(losses[0] - losses[1]) - 1)
    assert against["perplexity_change_percent"] == pytest.approx(change, abs=0.01) and abs(change) > 0.05
    assert against["name"] == "model" and against["target"] == "cpu:native" and len(against["digest"]) == 64


def test_a_model_agrees_with_itself(kit: Kit) -> None:
    """The reference is a Hugging Face folder, which is compiled into the cache or found there."""
    found = eval_artifact(kit.artifact, kit.text, kit.settings(against=str(kit.model), limit=300), Quiet())
    against = found["against"]
    assert (found["windows"], found["tokens"]) == (6, 6 * (CONTEXT - 1))
    assert against["top1_agreement_percent"] == 100 and against["perplexity_change_percent"] == 0
    assert [against[k] for k in ("kl_mean", "kl_stderr", "kl_p99", "kl_max")] == [0, 0, 0, 0]


def test_results_are_recorded_and_shown(kit: Kit, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = json.loads((copied / "manifest.json").read_text())["digest"]
    argv = ["eval", str(copied), str(kit.text), "--context", "40", "--limit", "120"]
    out = io.StringIO()
    assert main(argv, out) == 0
    assert "117 tokens of readme.txt in 3 windows of 40" in out.getvalue()
    assert "  perplexity  " in out.getvalue() and "recorded in the artifact" not in out.getvalue()
    assert "117 tokens" in capsys.readouterr().err and not (copied / "report/eval.json").exists()
    out = io.StringIO()
    assert main([*argv, "--against", str(kit.other), "--record", "--json"], out) == 0
    printed, recorded = json.loads(out.getvalue()), json.loads((copied / "report/eval.json").read_text())
    assert {k: printed[k] for k in recorded} == recorded and printed["recorded"]
    assert recorded["text"]["name"] == "readme.txt" and recorded["text"]["bytes"] == kit.text.stat().st_size
    assert str(kit.text.parent) not in json.dumps(recorded)
    assert json.loads((copied / "manifest.json").read_text())["digest"] != before and verify_artifact(copied)["ok"]
    out = io.StringIO()
    assert main(["inspect", str(copied)], out) == 0 and main(["report", str(copied)], out) == 0
    assert f"accuracy  perplexity {recorded['perplexity']:.4f} on 117 tokens" in out.getvalue()
    page = copied.with_suffix(".html").read_text()
    assert "117 tokens of readme.txt" in page and f"{recorded['against']['perplexity']:.4f}" in page
    assert main([*argv, "--record"]) == 0  # replaces it
    assert json.loads((copied / "report/eval.json").read_text())["against"] is None
    assert main(["pack", str(copied), str(kit.changed)]) == 0  # the result was of the weights before
    out = io.StringIO()
    assert main(["inspect", str(copied)], out) == 0 and "accuracy  not recorded" in out.getvalue()
    assert not (copied / "report/eval.json").exists()


def test_a_damaged_record_is_refused(kit: Kit, copied: Path) -> None:
    eval_artifact(copied, kit.text, kit.settings(limit=45, against=str(kit.other), record=True), Quiet())
    good = json.loads((copied / "report/eval.json").read_text())
    for wrong in (
        {}, [], {**good, "perplexity": "low"}, {**good, "windows": -1}, {**good, "text": {}}, {**good, "against": 1},
        {**good, "against": {**good["against"], "perplexity_change_percent": None}},
        {**good, "against": {k: v for k, v in good["against"].items() if k != "kl_p99"}},
    ):  # fmt: skip
        put_file(copied, "report/eval.json", json.dumps(wrong).encode())
        with pytest.raises(LlmcError, match=r"E103.*eval.json"):
            inspected(copied)
    better = {**good, "against": {**good["against"], "perplexity_change_percent": -1.5}}
    put_file(copied, "report/eval.json", json.dumps(better).encode())
    assert "-1.50 %" in inspected(copied)


def inspected(path: Path) -> str:
    return render(inspect_artifact(path))


TEXTS: tuple[tuple[bytes | None, str], ...] = (
    (None, "cannot be read"),
    (b"", "is empty"),
    (b"\xef\xbb\xbf", "is empty"),
    (b"plain words, then \xe9 in Latin-1", "is not UTF-8 text: .* at byte 18"),
    (b"a tail that is cut: \xf0\x9f\x99", "is not UTF-8 text"),
    (b"PK\x03\x04\0\0\0", "is not text: it contains NUL bytes"),
    (b"a short text", "has [0-9]+ tokens; a window needs 44"),
)


@pytest.mark.parametrize(("data", "why"), TEXTS)
def test_texts_that_cannot_be_scored(kit: Kit, tmp_path: Path, data: bytes | None, why: str) -> None:
    if data is not None:
        (tmp_path / "text.txt").write_bytes(data)
    with pytest.raises(LlmcError, match=f"E130: .*text.txt {why}"):
        eval_artifact(kit.artifact, tmp_path / "text.txt", kit.settings(), Quiet())


def test_a_text_that_changes_while_it_is_scored(kit: Kit, tmp_path: Path) -> None:
    path = Path(shutil.copy(kit.text, tmp_path / "text.txt"))

    class Cutting(Quiet):
        def begin(self, name: str, detail: str = "") -> None:
            path.write_text("short")

    with pytest.raises(LlmcError, match=r"E130.*text.txt changed"):
        eval_artifact(kit.artifact, path, kit.settings(), Cutting())


def test_settings_out_of_range(kit: Kit, tmp_path: Path) -> None:
    for changes in ({"context": 1}, {"context": 1025}, {"limit": CONTEXT - 1}):
        with pytest.raises(LlmcError, match="E201"):
            eval_artifact(kit.artifact, kit.text, kit.settings(**changes), Quiet())
    with pytest.raises(LlmcError, match=r"E130.*is not a regular file"):
        eval_artifact(kit.artifact, tmp_path, kit.settings(), Quiet())
    with pytest.raises(LlmcError, match="E101"):
        eval_artifact(kit.artifact, kit.text, kit.settings(against=str(tmp_path / "none.llmc")), Quiet())


def test_models_that_cannot_be_compared(kit: Kit, copied: Path, toy: Path) -> None:
    with pytest.raises(LlmcError, match=r"E131.*in its vocabulary"):
        eval_artifact(kit.artifact, kit.text, kit.settings(against=str(toy)), Quiet())
    tokenizer = json.loads((copied / "tokenizer/tokenizer.json").read_text())
    plain = {**tokenizer, "post_processor": None}
    merges = {**tokenizer, "model": {**tokenizer["model"], "merges": tokenizer["model"]["merges"][:100]}}
    for other, why in ((plain, "other special tokens"), (merges, "another tokenizer")):
        replace_file(copied, "tokenizer/tokenizer.json", json.dumps(other).encode())
        with pytest.raises(LlmcError, match=f"E131.*{why}"):
            eval_artifact(kit.artifact, kit.text, kit.settings(against=str(copied)), Quiet())


def replace_file(artifact: Path, name: str, data: bytes) -> None:
    """Replace a file that the manifest needs, with its hash."""
    (artifact / name).write_bytes(data)
    manifest = Folder(artifact).manifest()
    files = {**manifest.files, name: FileInfo(sha256(data), len(data))}
    (artifact / "manifest.json").write_bytes(replace(manifest, files=files).dump())


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A handmade artifact with a tokenizer of 64 letters, whose programs compute no logits."""
    files = textkit.write_folder(tmp_path / "tokenizer", textkit.small(), {})
    write_artifact(tmp_path / "toy.llmc", replace(tiny.parts(tmp_path), tokenizer=sorted(files.iterdir())))
    return tmp_path / "toy.llmc"


def test_logits_that_a_program_does_not_keep(toy: Path, kit: Kit, tmp_path: Path) -> None:
    executor = load_executor(toy)
    with pytest.raises(RuntimeError, match="after a step"):
        executor.logits()
    with pytest.raises(LlmcError, match=r"E113.*keeps no logits"):
        list(score_tokens(executor, [1, 2, 3], 2, logits=True))
    assert len(list(score_tokens(executor, [1, 2, 3], 2))) == 1
    executor.close()
    executor = load_executor(kit.artifact, kv_bytes=1 << 20)
    with pytest.raises(LlmcError, match=r"E202.*KV pages"):
        list(score_tokens(executor, [1] * 1024, 16))
    executor.close()


def test_scores_depend_on_neither_the_step_nor_the_first_token(kit: Kit) -> None:
    executor = load_executor(kit.artifact)
    tokens = [(i * 37 + 11) % 4096 for i in range(50)]

    def scored(*args: Any) -> np.ndarray:
        return np.concatenate([s.logprobs for s in score_tokens(executor, tokens, *args)])

    whole = scored(16)
    assert whole == pytest.approx(scored(5), abs=1e-4) and len(whole) == 49
    assert scored(16, 3) == pytest.approx(whole[2:], abs=1e-4)
    parts = list(score_tokens(executor, tokens, 16, logits=True))
    logits = np.concatenate([s.logits for s in parts if s.logits is not None]).astype(np.float64)
    own = logits[np.arange(49), tokens[1:]] - np.log(np.exp(logits).sum(-1))
    assert own == pytest.approx(whole, abs=1e-4)
    assert (np.concatenate([s.top_ids for s in parts]) == logits.argmax(-1)).all()
    executor.close()


def letters(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.mark.parametrize("piece", [7, 64, 1 << 20])
def test_texts_are_read_in_pieces(tmp_path: Path, piece: int) -> None:
    text = "Größe and 東京\r\n\n  indented\nlast 🙂 line\n" * 9
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    parts = list(read_pieces(path, piece))
    assert "".join(parts) == text and max(map(len, parts)) <= max(piece, len(text) * (piece > 999))
    cuts = [(a[-1], b[0]) for a, b in pairwise(parts)]
    assert piece != 64 or (cuts and all(a == "\n" and not b.isspace() for a, b in cuts))
    found = survey(path, letters, None, piece)
    assert (found.tokens, found.text_bytes, found.file_bytes) == (len(text), len(text.encode()), path.stat().st_size)
    if piece < 999:
        assert len(text) > survey(path, letters, 50, piece).tokens >= 50


@pytest.mark.parametrize("piece", [7, 10_000])
def test_lines_of_json_are_documents(tmp_path: Path, piece: int) -> None:
    texts = ['Größe\u2028und \n"東京"\n', "", "last 🙂"]
    path = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=i == 0) for i, text in enumerate(texts)]
    path.write_text("\ufeff" + "\n\n".join(lines), encoding="utf-8")
    parts = list(read_pieces(path, piece))
    assert "".join(parts) == "".join(texts) and (piece == 7 or parts == [texts[0], texts[2]])
    found = survey(path, letters, None, piece)
    assert (found.text_bytes, found.file_bytes) == (len("".join(texts).encode()), path.stat().st_size)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"text": 3}', "line 2 has no field text"),
        ("{", "line 2 is not JSON"),
        ('{"text": "\\ud800"}', "line 2 has half"),
        ('"' + "x" * 99, "a line 2 of more than 64 characters"),
    ],
)
def test_lines_of_json_that_are_no_documents(
    tmp_path: Path, line: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmc.measure.eval_text.MAX_LINE_CHARACTERS", 64)
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a"}\n' + line)
    with pytest.raises(LlmcError, match=why) as e:
        list(read_pieces(path, 8))
    assert e.value.code == "E130"


def test_windows_need_no_more_than_their_pieces() -> None:
    endless: Iterator[str] = repeat("abcde")
    assert [*map(len, windows(endless, letters, (1,), 8, 1000))] == [8] * 1000
    rows = list(windows(iter(["abc", "", "defgh", "i"]), letters, (1, 2), 5, 9))
    assert rows == [[1, 2, *letters(s)] for s in ("abc", "def", "ghi")]
    assert list(windows(iter(["ab"]), letters, (), 3, 9)) == []


def test_percentiles_are_within_one_per_cent() -> None:
    values = np.exp(np.random.default_rng(3).normal(-6, 3, 5000))
    values[:50] = 0
    found = Distribution()
    for part in np.split(values, 10):
        found.add(part)
    for percent in (50, 90, 99, 100):
        assert found.percentile(percent) == pytest.approx(
            np.percentile(values, percent, method="inverted_cdf"), rel=0.01
        )
    assert found.percentile(1) == 0 and found.maximum == values.max() and found.count == 5000
    assert found.mean == pytest.approx(values.mean()) and found.stderr == pytest.approx(values.std(ddof=1) / 5000**0.5)


def test_the_kl_divergence() -> None:
    rng = np.random.default_rng(4)
    p, q = rng.normal(0, 4, (2, 40, 300)).astype(np.float32)
    p[3, :7], q[3, 5:9] = -np.inf, -9
    lp, lq = (x - np.log(np.exp(x.astype(np.float64)).sum(-1, keepdims=True)) for x in (p, q))
    with np.errstate(invalid="ignore"):
        expected = np.nansum(np.exp(lp) * (lp - lq), -1)
    assert kl_divergence(p, q) == pytest.approx(expected, rel=1e-5)
    assert (kl_divergence(p, p) == 0).all()
    q[0, 0] = np.nan
    assert np.isnan(kl_divergence(p, q)[0])
