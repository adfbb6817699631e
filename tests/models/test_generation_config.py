"""generation_config.json and adapters in a model folder: end-of-sequence tokens, defaults and notes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from models.cases import LISTED, SMALL, TINY_VISION
from models.kit import save

from llmc.frontend.export import load_config
from llmc.frontend.model_folder import open_source
from llmc.frontend.trace_model import _ids as ids_of
from llmc.frontend.trace_model import notes_of, trace


def test_ends_of_a_model_with_a_text_half(tmp_path: Path) -> None:
    """The model's own come first, as in transformers; its text half's may be a default of its class."""
    text = {**SMALL, "head_dim": 16, "eos_token_id": 9}
    whole: dict[str, Any] = {"model_type": "gemma3", "dtype": "float32", "text_config": text, **TINY_VISION}
    for more, generation, want in (
        ({}, {}, (9,)),
        ({"eos_token_id": [1, 106]}, {}, (1, 106)),
        ({"eos_token_id": []}, {"eos_token_id": []}, (9,)),
        ({"eos_token_id": 3}, {"eos_token_id": [4, -1]}, (4,)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(whole | more))
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        source = open_source(tmp_path)
        text_half = load_config(source).get_text_config()
        assert ids_of(source, text_half, "eos_token_id") == want
    assert trace(tmp_path).facts.eos_token_ids == want


def test_notes_on_files_beside_the_weights(tmp_path: Path) -> None:
    save(LISTED[0], tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    traced = trace(tmp_path)
    assert not [*notes_of(traced)]
    neutral = {"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "bad_words_ids": None, "stop_strings": []}
    given = {"num_beams": 4, "suppress_tokens": [5], "top_k": 3, "max_length": 20}
    (tmp_path / "adapter_config.json").write_text("{}")
    for generation, count in ((neutral, 1), (given, 3)):
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        notes = [*notes_of(replace(traced, source=open_source(tmp_path)))]
        assert len(notes) == count and "adapter" in notes[0]
    assert "top_k 3" in notes[1] and "has num_beams, suppress_tokens: not applied" in notes[2]
