"""Models that pool, compiled for the CPU: parity with transformers and with the pooling of sentence-transformers, mixed
batches, chunked prompts, and unsupported configurations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from draw import SEED
from kernel_cache import CACHE
from llmc_runtime import LLM, LlmcError, PoolingParams
from models.kit import fails
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from llmc.compilation import pooling_notes
from llmc.driver import compile_model
from llmc.frontend.export import quiet
from llmc.frontend.model_folder import open_source
from llmc.frontend.pooling_files import read_pooled
from llmc.frontend.trace_model import trace
from llmc.options import Options

VOCAB, LENGTH, ROWS = 96, 64, 4
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "max_position_embeddings": LENGTH,
}  # fmt: skip
CLS, SEP, EOS = 2, 3, 4


@dataclass(frozen=True)
class Model:
    """A model to draw: its class and config, and the pooling and normalising that modules.json lists, if any."""

    name: str
    owner: str
    config: dict[str, Any]
    pooling: str = ""
    normalize: bool = True


QWEN = Model("qwen3", "Qwen3Model", {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}, "lasttoken")
BERT = Model("bert", "BertModel", {}, "mean", False)
ROBERTA = Model("xlm-roberta", "XLMRobertaModel", {"type_vocab_size": 1, "max_position_embeddings": LENGTH + 2}, "cls")
CROSS = Model("bert", "BertForSequenceClassification", {"num_labels": 1})
RERANKER = Model(
    "xlm-roberta", "XLMRobertaForSequenceClassification",
    {"type_vocab_size": 1, "max_position_embeddings": LENGTH + 2, "num_labels": 3},
)  # fmt: skip
DECODER = Model(
    "qwen2", "Qwen2ForSequenceClassification", {"num_key_value_heads": 2, "num_labels": 1, "pad_token_id": 0}
)


def write_tokenizer(folder: Path, encoder: bool) -> None:
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": CLS, "[SEP]": SEP, "[EOS]": EOS}
    words |= {f"w{i}": i for i in range(len(words), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[EOS]"])
    single, pair = ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1") if encoder else ("$A [EOS]", "$A $B:1 [EOS]:1")
    special = [("[CLS]", CLS), ("[SEP]", SEP), ("[EOS]", EOS)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))


def save(model: Model, folder: Path) -> Any:
    """Draw a model, and save it with a tokenizer and the files of sentence-transformers; returns it."""
    torch.manual_seed(SEED % 2**31)
    with quiet():
        config = transformers.AutoConfig.for_model(model.name, **{**SIZES, **model.config})
        drawn = getattr(transformers, model.owner)._from_config(config, attn_implementation="eager").eval()
    for name, p in drawn.named_parameters():
        p.data.normal_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.25)
    drawn.save_pretrained(folder)
    write_tokenizer(folder, encoder=not model.name.startswith("qwen"))
    if model.pooling:
        kinds = ["Transformer", "Pooling", *(["Normalize"] if model.normalize else [])]
        paths = ["", "1_Pooling", "2_Normalize"]
        modules = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(zip(kinds, paths))
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        flags = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({f"pooling_mode_{flag}": kind == model.pooling for kind, flag in flags.items()})
        )
    return drawn


def expected(model: Model, drawn: Any, ids: list[int]) -> np.ndarray:
    """The result of transformers for one prompt, pooled and normalised as sentence-transformers does.

    Ids from VOCAB on are of the second segment.
    """
    more: dict[str, Any] = {}
    if model.name == "bert":
        more["token_type_ids"] = torch.tensor([[i // VOCAB for i in ids]])
    with torch.no_grad():
        out = drawn(torch.tensor([[i % VOCAB for i in ids]]), attention_mask=torch.ones(1, len(ids)).long(), **more)
    if not model.pooling:
        logits = out.logits[0]
        return np.asarray(torch.sigmoid(logits) if len(logits) == 1 else torch.softmax(logits, -1))
    hidden = out.last_hidden_state[0]
    pooled = {"cls": hidden[0], "mean": hidden.mean(0), "lasttoken": hidden[-1]}[model.pooling]
    return np.asarray(torch.nn.functional.normalize(pooled, dim=0) if model.normalize else pooled)


def numbers(llm: LLM, ids: list[list[int]]) -> np.ndarray:
    prompts = [{"prompt_token_ids": one} for one in ids]
    if llm.pooling is not None and llm.pooling.task == "embed":
        return np.array([o.outputs.embedding for o in llm.embed(prompts, use_tqdm=False)])
    return np.array([o.outputs.probs for o in llm.classify(prompts, use_tqdm=False)])


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tuple[Any, LLM]]]:
    """Return a function that draws, compiles and opens a model; further options are those of LLM."""
    print(f"seed {SEED}")
    folder, found, llms = tmp_path_factory.mktemp("pooling"), dict[str, Any](), list[LLM]()

    def open_model(model: Model, **options: Any) -> tuple[Any, LLM]:
        path = folder / model.owner
        if model.owner not in found:
            found[model.owner] = save(model, path)
            compile_model(path, path / "out.llmc", Options(cache=CACHE, reuse=False, max_num_seqs=ROWS))
        llms.append(LLM(path / "out.llmc", say=lambda line: None, **options))
        return found[model.owner], llms[-1]

    yield open_model
    for llm in llms:
        llm.close()


DRAWN = [pytest.param(model, marks=pytest.mark.drawn) for model in (ROBERTA, DECODER)]


@pytest.mark.parametrize("model", [QWEN, BERT, CROSS, RERANKER, *DRAWN], ids=lambda model: model.owner)
def test_parity(model: Model, opened: Callable[..., tuple[Any, LLM]]) -> None:
    """Prompts of many lengths in mixed batches agree with transformers, and equal the same prompts one by one."""
    drawn, llm = opened(model)
    assert llm.pooling is not None
    rng = np.random.default_rng(SEED)
    ids = [rng.integers(CLS, VOCAB, n).tolist() for n in (1, 2, 3, 17, 31, 33, LENGTH - 1, LENGTH, 5, 16)]
    if llm.pooling.segments > 1:  # the second half of each prompt is the second segment
        ids = [[i + VOCAB * (at >= len(one) // 2) for at, i in enumerate(one)] for one in ids]
    together = numbers(llm, ids)
    assert np.abs(together - np.stack([expected(model, drawn, one) for one in ids])).max() < 2e-5
    assert np.abs(together - np.concatenate([numbers(llm, [one]) for one in ids])).max() < 1e-6


def test_prompts_of_a_decoder_in_chunks(opened: Callable[..., tuple[Any, LLM]]) -> None:
    """A step takes 8 tokens, and prefixes are shared: the embeddings stay the same."""
    drawn, llm = opened(QWEN, max_num_batched_tokens=8)
    rng = np.random.default_rng(SEED)
    start = rng.integers(5, VOCAB, 40).tolist()
    ids = [start + rng.integers(5, VOCAB, n).tolist() for n in (3, 9, 20)]
    for _ in range(2):
        got = numbers(llm, ids)
        assert np.abs(got - np.stack([expected(QWEN, drawn, one) for one in ids])).max() < 2e-5
    (again,) = llm.embed({"prompt_token_ids": ids[0]}, use_tqdm=False)
    assert again.num_cached_tokens >= 32 and again.prompt_token_ids == ids[0]
    stats = llm.stats()
    assert stats["generation_tokens"] == 0 and stats["prompt_tokens"] == sum(map(len, ids)) * 2 + len(ids[0])


def test_dimensions(opened: Callable[..., tuple[Any, LLM]]) -> None:
    """Matryoshka: the first numbers, normalised again; or as the model returned them."""
    _, llm = opened(QWEN)
    raw = llm.embed("w9 w8", PoolingParams(use_activation=False), use_tqdm=False)[0].outputs.embedding
    cut = llm.embed("w9 w8", PoolingParams(dimensions=7), use_tqdm=False)[0].outputs
    assert cut.hidden_size == 7 and np.allclose(cut.embedding, np.array(raw[:7]) / np.linalg.norm(raw[:7]), atol=1e-6)
    for dimensions in (0, 33, True):
        with pytest.raises(LlmcError, match="E601"):
            llm.embed("w9", PoolingParams(dimensions=dimensions), use_tqdm=False)


def test_scores(opened: Callable[..., tuple[Any, LLM]]) -> None:
    """A cross-encoder reads both texts in segments; an embedding model compares two embeddings."""
    drawn, llm = opened(CROSS)
    (one, other) = llm.score("w5 w6", ["w7", "w8 w9 w10"], use_tqdm=False)
    ids = [CLS, 5, 6, SEP, 7 + VOCAB, SEP + VOCAB]
    assert one.prompt_token_ids == ids and len(other.prompt_token_ids) == 8
    assert abs(one.outputs.score - expected(CROSS, drawn, ids)[0]) < 1e-5
    _, llm = opened(QWEN)
    vectors = [np.array(o.outputs.embedding) for o in llm.embed(["w5 w6", "w7", "w5 w6"], use_tqdm=False)]
    found = llm.score(["w5 w6", "w5 w6"], ["w7", "w5 w6"], use_tqdm=False)
    assert np.allclose([o.outputs.score for o in found], [vectors[0] @ vectors[1], 1.0], atol=1e-6)


def test_segments_are_those_that_the_tokenizer_returns(tmp_path: Path) -> None:
    """transformers passes no token types if the tokenizer's class, or its list of inputs, has none."""
    save(CROSS, tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    names = {"model_input_names": ["input_ids", "attention_mask"]}
    more = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 2), ({"tokenizer_class": "BertTokenizerFast"}, 2), ({"tokenizer_class": "PreTrainedTokenizerFast"}, 1),
        ({"tokenizer_class": "BertTokenizer", **names}, 1), ({"tokenizer_class": "PreTrainedTokenizerFast", **more}, 2),
    ]  # fmt: skip
    for config, segments in cases:
        settings.write_text(json.dumps(config))
        found = transformers.AutoTokenizer.from_pretrained(tmp_path)("w5", "w6")
        assert ("token_type_ids" in found) == (segments == 2), config
        pooling = trace(tmp_path).facts.pooling
        assert pooling is not None and pooling.segments == segments, config


def test_settings_of_sentence_transformers_6(tmp_path: Path) -> None:
    """The activation, the default prompt, the dimensions and the maximum length are where version 6 writes them."""
    save(CROSS, tmp_path / "cross")
    save(BERT, tmp_path / "bert")
    settings = "config_sentence_transformers.json"
    for name, activation in (("linear.Identity", "none"), ("activation.Sigmoid", "sigmoid")):
        (tmp_path / "cross" / settings).write_text(json.dumps({"activation_fn": f"torch.nn.modules.{name}"}))
        model = read_pooled(open_source(tmp_path / "cross"))
        assert model is not None and model.pooling.activation == activation
    (tmp_path / "cross" / settings).write_text(json.dumps({"activation_fn": "somewhere.Else"}))
    fails("E313", "somewhere.Else", do=lambda: read_pooled(open_source(tmp_path / "cross")))
    prompts = {"query": "query: ", "document": ""}
    (tmp_path / "bert" / "tokenizer_config.json").write_text('{"model_max_length": 48}')
    for more, words in (
        ({"default_prompt_name": "query"}, "'query: ' in front"),
        ({"default_prompt_name": "document"}, ""),
        ({"truncate_dim": 8}, "dimensions=8"),
    ):
        (tmp_path / "bert" / settings).write_text(json.dumps({"prompts": prompts, **more}))
        source = open_source(tmp_path / "bert")
        model = read_pooled(source)
        assert model is not None and model.max_length == 48
        first, *rest = pooling_notes(model.pooling, source)
        assert "mean of all tokens" in first and len(rest) == bool(words) and words in "".join(rest)


def test_refused(opened: Callable[..., tuple[Any, LLM]]) -> None:
    _, llm = opened(BERT)
    for do in (
        lambda: llm.generate("w5"),
        lambda: llm.classify("w5"),
        lambda: opened(RERANKER)[1].score("w5", "w6"),
        lambda: opened(RERANKER)[1].embed("w6"),
    ):
        with pytest.raises(LlmcError, match="E616"):
            do()
    with pytest.raises(LlmcError, match=f"E602.*compiled for {LENGTH}\n.*{LENGTH} tokens"):
        llm.embed({"prompt_token_ids": [5] * (LENGTH + 1)}, use_tqdm=False)
    with pytest.raises(LlmcError, match="E625"):
        opened(CROSS)[1].score(["w5", "w6"], ["w7"] * 3)


def test_refused_folders(tmp_path: Path) -> None:
    """Errors name the unsupported pooling of a folder."""
    save(BERT, tmp_path)
    pooling, modules = tmp_path / "1_Pooling" / "config.json", tmp_path / "modules.json"
    for flags in (
        {"pooling_mode_max_tokens": True},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
    ):
        pooling.write_text(json.dumps(flags))
        fails("E313", "1_Pooling", do=lambda: trace(tmp_path))
    pooling.write_text(json.dumps({"pooling_mode": "mean"}))
    assert trace(tmp_path).facts.pooling is not None
    entries = json.loads(modules.read_text())
    modules.write_text(json.dumps([*entries, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]))
    fails("E313", "Dense", do=lambda: trace(tmp_path))
    modules.write_text(json.dumps([{"type": "x.Pooling", "path": "../elsewhere"}]))
    fails("E302", "elsewhere", do=lambda: trace(tmp_path))
    modules.write_text(json.dumps(entries))
    fails("E313", "--task classify", do=lambda: trace(tmp_path, task="classify"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "distilbert"}))
    fails("E313", "distilbert", "xlm-roberta", do=lambda: trace(tmp_path))
    source = open_source(Path(__file__).resolve().parents[2] / "examples" / "demo-model")
    assert read_pooled(source) is None and read_pooled(source, "embed", "mean") is not None
    fails("E313", "--pooling mean", "--task embed", do=lambda: read_pooled(source, kind="mean"))


@pytest.mark.parametrize(
    ("name", "owner", "code", "words"),
    [
        ("qwen2_vl", "Qwen2VLForSequenceClassification", "E313", "no classifier of texts"),
        ("llama4", "Llama4Model", "E313", "no base model without a head"),
        ("qwen2_5_omni", "Qwen2_5OmniModel", "E313", "not supported for models that pool"),
        ("gemma3_text", "Gemma3TextModel", "E305", "use_bidirectional_attention"),
    ],
)
def test_refused_model_types(name: str, owner: str, code: str, words: str, tmp_path: Path) -> None:
    entries = {"model_type": name, "architectures": [owner]}
    if name == "gemma3_text":
        entries |= {"use_bidirectional_attention": True}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    fails(code, name, words, do=lambda: trace(tmp_path))
