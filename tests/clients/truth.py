"""Runs the model in process with LLM: reads a request as a line of JSON, and prints the output as a line of JSON.

`truth.py ARTIFACT`, run in the project's environment. A line: {"messages"} or {"prompt"} (a text or token ids), fields
of SamplingParams, and "schema" for a JSON schema, its white space as in response_format. Greedy by default.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from llmc_runtime import LLM, SamplingParams, StructuredOutputsParams

WHITESPACE = " ?"  # docs/serving.md


def answer(llm: LLM, asked: dict[str, Any]) -> dict[str, Any]:
    """The first output of one request."""
    messages, prompt, schema = (asked.pop(name, None) for name in ("messages", "prompt", "schema"))
    guide = None if schema is None else StructuredOutputsParams(json=schema, whitespace_pattern=WHITESPACE)
    params = SamplingParams(**{"temperature": 0.0, "structured_outputs": guide, **asked})
    run = llm.chat if messages is not None else llm.generate
    output = run([messages if messages is not None else prompt], params, use_tqdm=False)[0]
    one = output.outputs[0]
    rows = output.prompt_logprobs
    return {
        "text": one.text, "token_ids": list(one.token_ids), "finish_reason": one.finish_reason,
        "prompt_token_ids": list(output.prompt_token_ids),
        "prompt_logprobs": rows and [
            row and {str(token): one.logprob for token, one in row.items()} for row in rows
        ],
    }  # fmt: skip


if __name__ == "__main__":
    with LLM(sys.argv[1], threads=1) as model:
        for line in sys.stdin:
            print(json.dumps(answer(model, json.loads(line))), flush=True)
