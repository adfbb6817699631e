"""A draft model in an artifact of its own drafts as one in the model's artifact does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError, SamplingParams
from llmc_runtime.engine.open_model import open_model
from llmc_runtime.engine_options import EngineOptions
from llmc_runtime.exec.draft_artifact import joint_digest, open_with_draft
from llmc_runtime.exec.load_executor import load_executor
from llmc_runtime.format.folder import Folder
from llmc_runtime.format.manifest import Manifest, State
from models.cases import LISTED
from models.kit import save
from models.recurrent_cases import RECURRENT
from models.test_draft_model import LIMITS, accepted, find, other
from models.test_pooling_server import Served, serve
from models.test_speculation import DEMO, SMALL_DEMO, eager, quiet, requests, results  # noqa: F401

from llmc.driver import compile_model
from llmc.options import Options

pytestmark = pytest.mark.slow(seconds=10)
HEAD = DEMO.parent / "demo-model-head"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demonstration model in bfloat16 and int4, with its sibling inside, and the sibling by itself.

    The last was compiled for the first. Another build of the model verifies no drafts.
    """
    folder = tmp_path_factory.mktemp("demo")
    compile_model(DEMO, folder / "model.llmc", Options(cache=CACHE, speculate=4))
    compile_model(DEMO, folder / "int4.llmc", Options(cache=CACHE, speculate=2, quant="int4"))
    compile_model(DEMO, folder / "both.llmc", Options(cache=CACHE, draft=str(SMALL_DEMO)))
    compile_model(DEMO, folder / "plain.llmc", Options(cache=CACHE))
    compile_model(SMALL_DEMO, folder / "draft.llmc", Options(cache=CACHE, drafts_for=folder / "model.llmc"))
    return folder


def sampled() -> list[SamplingParams]:
    """Greedy and seeded sampling."""
    print(f"seed {SEED}")
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    return [greedy, *(replace(greedy, temperature=0.8, top_p=0.95, seed=SEED + i) for i in range(3))]


def tokens(llm: LLM) -> list[list[int]]:
    params = sampled()
    outs = llm.generate(["When the morning came, the old man"] * len(params), params, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("model", ["model", "int4", "both"])
def test_tokens_are_those_of_plain_decoding(demo: Path, model: str) -> None:
    """Of the model for which it was compiled, an int4 build that verifies fewer drafts, and one with its own draft."""
    with LLM(demo / f"{model}.llmc", say=quiet) as llm:
        want = tokens(llm)
    with LLM(demo / f"{model}.llmc", say=quiet, draft_model=demo / "draft.llmc") as llm:
        assert tokens(llm) == want and tokens(llm) == want, "also with the prefix cache"
        drafts, right = accepted(llm)
        assert 0 < right < drafts
        assert llm.engine.scheduler.pool.num_used == 0
        kv = llm.engine.executor.artifact.manifest.kv
        assert kv.layers == 8 + 3 and kv.bytes_per_page == (8 * 4096 + 3 * 4096), "pages of both, once"


@pytest.mark.usefixtures("eager")
def test_drafts_are_those_of_the_same_artifact(demo: Path) -> None:
    """The same numbers of drafts are made and accepted; both artifacts run on one pool of threads."""
    counts = []
    for options in ({"model": demo / "both.llmc"}, {"model": demo / "model.llmc", "draft_model": demo / "draft.llmc"}):
        with LLM(**options, say=quiet, speculate="draft", threads=3) as llm:  # type: ignore[arg-type]
            counts.append((tokens(llm), accepted(llm), llm.engine.executor.capacity, num_pool_threads()))
    assert counts[0] == counts[1]


def num_pool_threads() -> int:
    """The number of threads of this process that Python did not start."""
    import threading

    return len(list(Path("/proc/self/task").iterdir())) - threading.active_count()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_changes_with_preemption_and_ranks(ranks: int, tmp_path: Path) -> None:
    """Every kind of sampling, chunks of prompts, and pages for few sequences; ranks share the draft model, too."""
    save(find("qwen3"), tmp_path / "model", SEED)
    save(LISTED[0], tmp_path / "draft", SEED + 1)
    path, draft = tmp_path / "model.llmc", tmp_path / "draft.llmc"
    compile_model(tmp_path / "model", path, Options(**LIMITS, speculate=4, tensor_parallel_size=ranks))
    compile_model(tmp_path / "draft", draft, Options(cache=CACHE, drafts_for=path))
    prompts, params = requests()
    with LLM(path, say=quiet, threads=1) as llm:
        want = results(llm, prompts, params)
    page = sum(json.loads((p / "manifest.json").read_text())["kv"]["bytes_per_page"] for p in (path, draft))
    with LLM(path, say=quiet, threads=1, draft_model=draft, kv_cache_memory_bytes=12 * page) as llm:
        assert llm.engine.executor.capacity.pages == 12
        assert results(llm, prompts[::-1], params[::-1]) == want[::-1]
        assert llm.stats()["num_preemptions"] > 0 and accepted(llm)[1] > 0


def test_quantised_drafts(demo: Path, tmp_path: Path) -> None:
    """--quant applies to a draft model as to any model."""
    draft = tmp_path / "draft.llmc"
    compile_model(SMALL_DEMO, draft, Options(cache=CACHE, drafts_for=demo / "model.llmc", quant="int8"))
    sizes = [sum(f.stat().st_size for f in (d / "weights").iterdir()) for d in (draft, demo / "draft.llmc")]
    assert sizes[0] < 0.9 * sizes[1]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outs = []
    for options in ({}, {"draft_model": draft}):
        with LLM(demo / "model.llmc", say=quiet, **options) as llm:  # type: ignore[arg-type]
            outs.append(llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].token_ids)
    assert outs[0] == outs[1]


def test_random_weights_are_those_of_the_same_artifact(tmp_path: Path) -> None:
    """Artifacts without files of weights, such as those of benchmarks, have a seed each."""
    options = Options(cache=CACHE, weights="random:5")
    compile_model(DEMO, tmp_path / "both.llmc", replace(options, draft=str(SMALL_DEMO)))
    compile_model(DEMO, tmp_path / "model.llmc", replace(options, speculate=4))
    compile_model(SMALL_DEMO, tmp_path / "draft.llmc", replace(options, drafts_for=tmp_path / "model.llmc"))
    found = []
    for path, draft in (("both", None), ("model", tmp_path / "draft.llmc")):
        with LLM(tmp_path / f"{path}.llmc", say=quiet, speculate="draft", draft_model=draft) as llm:
            found.append((tokens(llm), llm.engine.executor.draft_model.max_rows))
    assert found[0] == found[1]


@pytest.fixture(scope="module")
def server(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """llmc-serve with vLLM's JSON, which names the draft model's artifact."""
    config = {"method": "draft_model", "model": str(demo / "draft.llmc"), "num_speculative_tokens": 3}
    log = tmp_path_factory.mktemp("server") / "log"
    yield from serve(demo / "model.llmc", log, "--speculative-config", json.dumps(config))


def test_served(server: Served, demo: Path) -> None:
    """Texts are those of plain decoding; usage and metrics count accepted drafts."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(demo / "model.llmc", say=quiet) as llm:
        want = llm.generate("The history of the city", params, use_tqdm=False)[0].outputs[0].text
    body = {"prompt": "The history of the city", "temperature": 0, "max_tokens": 100, "ignore_eos": True}
    right = 0
    for _ in range(20):  # the cost model decides when to draft
        found = server.post("/v1/completions", model="m", **body)
        assert found["choices"][0]["text"] == want
        right += found["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0)
        if right:
            break
    assert right > 0
    assert "llmc:spec_decode_num_accepted_tokens_total" in server.http.get("/metrics").text


def test_reports(demo: Path, tmp_path: Path) -> None:
    """`llmc inspect` and `llmc verify` know what it is; it has no canary."""
    from llmc.measure.verify_artifact import verify_artifact
    from llmc.report.html_report import write_report
    from llmc.report.inspect import inspect_artifact, render

    facts = inspect_artifact(demo / "draft.llmc")
    assert facts["role"] == "draft_model" and facts["compile"]["options"]["drafts_for"] == "model.llmc"
    text = render(facts)
    assert "role      draft model of artifacts with this target" in text and "canary" not in text
    assert verify_artifact(demo / "draft.llmc")["ok"]
    found = verify_artifact(demo / "draft.llmc", canary=True)
    assert not found["ok"] and found["problems"][0]["code"] == "E208"
    write_report(demo / "draft.llmc", tmp_path / "report.html")
    assert "draft model" in (tmp_path / "report.html").read_text()


def fails(code: str, words: str, call: Callable[[], object]) -> None:
    with pytest.raises(LlmcError, match=words) as caught:
        call()
    assert caught.value.code == code and caught.value.remedy, caught.value


def test_refused_by_the_compiler(demo: Path, tmp_path: Path) -> None:
    """Another vocabulary, tokenizer or context, heads, artifacts that verify nothing, options that contradict it."""
    model, wrong = demo / "model.llmc", tmp_path / "wrong.llmc"
    vocab, context = (LISTED[0], 300, 1024), (LISTED[0], 4096, 512)
    for name, (case, size, positions) in {"vocabulary": vocab, "context": context}.items():
        save(other(case, vocab_size=size, max_position_embeddings=positions), tmp_path / name)
    hybrid = next(case for case in RECURRENT if case.name == "qwen3_next")
    save(other(hybrid, vocab_size=4096, max_position_embeddings=1024), tmp_path / "recurrent")
    shutil.copytree(SMALL_DEMO, tmp_path / "tokens")
    document = json.loads((tmp_path / "tokens" / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    a, b = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (tmp_path / "tokens" / "tokenizer.json").write_text(json.dumps(document))
    for source, words, more in (
        (tmp_path / "vocabulary", "vocabulary of 300 tokens, the model one of 4096", {}),
        (tmp_path / "context", "allows 512 positions; 1024 are compiled", {}),
        (tmp_path / "tokens", "has another tokenizer", {}),
        (HEAD, "reads the model's hidden states", {}),
        (f"eagle:{HEAD}", "reads the model's hidden states", {}),
        ("mtp", "reads the model's hidden states", {}),
        (SMALL_DEMO, "compiled without --speculate", {"drafts_for": demo / "plain.llmc"}),
        (SMALL_DEMO, "is a draft model itself", {"drafts_for": demo / "draft.llmc"}),
        (SMALL_DEMO, "--draft with --drafts-for", {"draft": str(SMALL_DEMO)}),
        (SMALL_DEMO, "--drafts-for with --weights none", {"weights": "none"}),
        (SMALL_DEMO, "--max-num-seqs 3 with --drafts-for .*which has 16", {"max_num_seqs": 3}),
        (SMALL_DEMO, "--max-model-len 99 ", {"max_model_len": 99}),
        (SMALL_DEMO, "--target cuda:sm_90 .*which has cpu:native", {"target": "cuda:sm_90"}),
        (SMALL_DEMO, "--tensor-parallel-size 2 ", {"tensor_parallel_size": 2}),
        (SMALL_DEMO, "--speculate 3 ", {"speculate": 3}),
    ):
        options = Options(**{"cache": CACHE, "drafts_for": model, **more})  # type: ignore[arg-type]
        fails("E360", words, lambda source=source, options=options: compile_model(source, wrong, options))  # type: ignore[misc]
    options = Options(cache=CACHE, drafts_for=model)
    fails("E435", "the draft model has recurrent layers", lambda: compile_model(tmp_path / "recurrent", wrong, options))
    lost = Options(cache=CACHE, drafts_for=tmp_path / "lost.llmc")
    fails("E101", "does not exist", lambda: compile_model(SMALL_DEMO, wrong, lost))
    assert not wrong.exists()


def test_refused_by_the_runtime(demo: Path, tmp_path: Path) -> None:
    """A draft model by itself, a model in its place, artifacts that do not agree, a model with a head or no drafts."""
    model, draft = demo / "model.llmc", demo / "draft.llmc"
    fails("E208", "is a draft model, which generates nothing by itself", lambda: LLM(draft, say=quiet))
    fails("E208", "is a draft model, which generates nothing by itself", lambda: load_executor(draft))
    fails("E208", "not of a draft model", lambda: LLM(model, say=quiet, draft_model=demo / "both.llmc"))
    fails("E101", "does not exist", lambda: LLM(model, say=quiet, draft_model=demo / "lost.llmc"))
    fails("E204", "verifies? at most 2|at most 2", lambda: LLM(
        demo / "int4.llmc", say=quiet, draft_model=draft, speculate="draft:3"
    ))  # fmt: skip
    compile_model(DEMO, tmp_path / "eagle.llmc", Options(cache=CACHE, draft=f"eagle:{HEAD}"))
    for path, code, words in (
        (demo / "plain.llmc", "E204", "compiled without --speculate"),
        (tmp_path / "eagle.llmc", "E208", "drafts by eagle3"),
    ):
        fails(code, words, lambda path=path: LLM(path, say=quiet, draft_model=draft))  # type: ignore[misc]


def rewritten(folder: Path, to: Path, change: Callable[[Manifest], Manifest]) -> Path:
    """Copy an artifact with another manifest."""
    shutil.copytree(folder, to)
    (to / "manifest.json").write_bytes(change(Folder(folder).manifest()).dump())
    return to


def test_every_part_of_the_interface_is_compared(demo: Path, tmp_path: Path) -> None:
    model, draft = demo / "model.llmc", demo / "draft.llmc"

    def wider(state: State) -> State:
        return replace(state, dtype="i64") if state.name == "row.iparams" else state

    for name, change in {
        "max_model_len 9": lambda m: replace(m, limits=replace(m.limits, max_model_len=9)),
        "max_num_batched_tokens 9": lambda m: replace(m, limits=replace(m.limits, max_num_batched_tokens=9)),
        "a vocabulary of 9": lambda m: replace(m, vocab_size=9),
        "pages of the size 8": lambda m: replace(m, kv=replace(m.kv, page_size=8)),
        "a number of ranks of 2": lambda m: replace(m, ranks=2),
        "the target cpu:portable": lambda m: replace(m, target=replace(m.target, name="cpu:portable")),
        r"the state row.iparams i64\[16, 8\]": lambda m: replace(m, states=tuple(map(wider, m.states))),
    }.items():
        changed = rewritten(draft, tmp_path / str(len(name)), change)
        fails("E208", f"compiled for {name}; .* has ", lambda path=changed: open_with_draft(model, path))  # type: ignore[misc]
        shutil.rmtree(changed)


def test_another_tokenizer_is_found_when_the_model_opens(demo: Path, tmp_path: Path) -> None:
    """A tokenizer.json with the same tokens in other bytes is accepted, one with other tokens is not."""
    from llmc_runtime.format.hashing import sha256
    from llmc_runtime.format.manifest import FileInfo

    name = "tokenizer/tokenizer.json"
    document = json.loads((demo / "draft.llmc" / name).read_text())
    vocabulary = document["model"]["vocab"]
    a, b = sorted(vocabulary, key=vocabulary.__getitem__)[-2:]
    for swapped in (False, True):
        if swapped:
            vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
        data = json.dumps(document, indent=3).encode()
        info = FileInfo(sha256(data), len(data))

        def change(m: Manifest, info: FileInfo = info) -> Manifest:
            return replace(m, files={**m.files, name: info})

        path = rewritten(demo / "draft.llmc", tmp_path / str(swapped), change)
        (path / name).write_bytes(data)
        if swapped:
            fails("E208", "another tokenizer: token", lambda path=path: open_with_draft(demo / "model.llmc", path))  # type: ignore[misc]
        else:
            assert len(open_with_draft(demo / "model.llmc", path).parts) == 2


def test_a_replaced_draft_model_is_noticed(demo: Path, tmp_path: Path) -> None:
    """The digest with which an engine process opens the model is that of both artifacts."""
    model, draft = demo / "model.llmc", demo / "draft.llmc"
    options = EngineOptions(model, draft_model=draft)
    digest = joint_digest(model, Folder(model).manifest(), draft)
    with open_model(model, options, digest) as artifact:
        assert artifact.digest == digest != Folder(model).manifest().digest
    newer = rewritten(draft, tmp_path / "newer.llmc", lambda m: replace(m, compiler="another"))

    def reopen() -> None:
        with open_model(model, replace(options, draft_model=newer), digest):
            pass

    fails("E118", "was opened before", reopen)


def test_damage_is_found(demo: Path, tmp_path: Path) -> None:
    """Hashes of the draft model's weights are checked as those of the model are."""
    shutil.copytree(demo / "draft.llmc", tmp_path / "draft.llmc")
    file = next((tmp_path / "draft.llmc" / "weights").iterdir())
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    fails("E107", file.name, lambda: LLM(demo / "model.llmc", say=quiet, draft_model=tmp_path / "draft.llmc"))
