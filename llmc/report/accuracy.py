"""The results of `llmc eval` as text, for the command, `llmc inspect` and the build report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def accuracy_rows(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and values of the measures in `data`, the data of report/eval.json."""
    rows = [
        ("perplexity", f"{data['perplexity']:.4f} +/- {data['perplexity_stderr']:.4f}"),
        ("bits per byte", f"{data['bits_per_byte']:.4f}"),
    ]
    if (other := data["against"]) is None:
        return rows
    return [
        *rows,
        ("reference", f"{other['name']} for {other['target']}, digest {other['digest'][:16]}"),
        ("its perplexity", f"{other['perplexity']:.4f} +/- {other['perplexity_stderr']:.4f}"),
        ("change", f"{other['perplexity_change_percent']:+.2f} %"),
        ("top-1 agreement", f"{other['top1_agreement_percent']:.2f} %"),
        (
            "KL divergence",
            f"{other['kl_mean']:.3g} +/- {other['kl_stderr']:.2g} nats, 99th percentile {other['kl_p99']:.3g},"
            f" maximum {other['kl_max']:.3g}",
        ),
    ]


def scored_text(data: Mapping[str, Any]) -> str:
    """Describe which tokens were scored."""
    plural = "" if data["windows"] == 1 else "s"
    return f"{data['tokens']} tokens of {data['text']['name']} in {data['windows']} window{plural} of {data['context']}"


def accuracy_line(data: Mapping[str, Any]) -> str:
    """Return the most important measures in one line."""
    line = f"perplexity {data['perplexity']:.4f} on {scored_text(data)}"
    if (other := data["against"]) is not None:
        line += f"; against {other['name']} {other['perplexity_change_percent']:+.2f} %"
        line += f", top-1 agreement {other['top1_agreement_percent']:.2f} %, KL divergence {other['kl_mean']:.3g} nats"
    return line
