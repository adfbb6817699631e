"""Train an EAGLE-3 head for a model on text that the model itself has generated, on a CPU.

    llmc compile MODEL_DIR -o ARTIFACT --max-num-seqs 64
    python train_head.py --model MODEL_DIR --artifact ARTIFACT --out HEAD_DIR --minutes 12

The text needs no corpus: the model samples documents at temperatures 1 and 0.7,
and greedily from the first tokens of some.  The head learns the model's
distribution of the token after next, over the most frequent ids, in as many
passes as it drafts tokens.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from head import Head, features
from llmc_runtime import LLM, SamplingParams
from model import CONFIGS, Llama, load
from optimizer import optimizers
from torch import Tensor
from torch.nn import functional as F

LENGTH = 256  # tokens of a sequence
CHUNK = 16  # sequences that the model reads at once
HELD = 16  # sequences that are not trained on
WARMUP_STEPS, REPORT_STEPS = 20, 20
OTHER_RATE = 0.2  # of the learning rate, for the output matrix and the norms
PASSES, DECAY = 3, 0.8  # simulated drafts, and how much less each one counts than the one before
SHARES = ((1.0, 0.5), (0.7, 0.3))  # temperature -> share of the sequences; the rest is greedy
OPENING = 24  # sampled tokens with which a greedy sequence begins


def generated(artifact: Path, count: int) -> np.ndarray:
    """Sequences that the model generates, i64[count, LENGTH]."""
    with LLM(artifact) as llm:
        bos, rows = [0], []
        for temperature, share in SHARES:
            params = SamplingParams(temperature=temperature, max_tokens=LENGTH - 1, ignore_eos=True)
            rows += _run(llm, [bos] * int(count * share), params)
        starts = [row[:OPENING] for row in rows[: count - len(rows)]]
        rows += _run(llm, starts, SamplingParams(temperature=0.0, max_tokens=LENGTH - OPENING, ignore_eos=True))
    return np.array(rows)


def _run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [[*ids, *out.outputs[0].token_ids] for ids, out in zip(prompts, outputs, strict=True)]


@dataclass(frozen=True)
class Examples:
    """Sequences with what the model makes of them: ids, joined hidden states, distributions over the draft ids, and the
    most likely ids.
    """

    ids: Tensor
    joined: Tensor
    soft: Tensor
    best: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Tensor | slice) -> Examples:
        return Examples(self.ids[index], self.joined[index], self.soft[index], self.best[index])


def prepared(model: Llama, rows: Tensor, kept: Tensor) -> Examples:
    """Run the model once over all sequences; the large tensors are kept in 16 bits."""
    parts = []
    for ids in rows.split(CHUNK):
        joined, logits = features(model, ids)
        target = logits[:, 1:]  # of token i + 2, as position i of the head predicts it
        soft = target.softmax(-1)[..., kept].bfloat16()
        parts.append((ids, joined[:, :-1].bfloat16(), soft, target.argmax(-1)))
    return Examples(*(torch.cat(x) for x in zip(*parts, strict=True)))


def loss_of(head: Head, model: Llama, x: Examples, count: int) -> tuple[Tensor, Tensor]:
    """The loss of `count` passes, and the share of each pass's most likely ids that are the model's."""
    embedding, hidden, soft = model.model.embed_tokens(x.ids[:, 1:]), head.fc(x.joined.float()), x.soft.float()
    cos, sin = model.cos[: x.ids.shape[1] - 1], model.sin[: x.ids.shape[1] - 1]
    passes: list[tuple[Tensor, Tensor]] = []
    loss, right = torch.zeros(()), []
    for number in range(count):
        hidden = head.midlayer(embedding, hidden, cos, sin, passes)
        drafts = head.lm_head(head.norm(hidden)).log_softmax(-1)
        valid = slice(number, None)  # earlier positions lack the hidden state of the pass before
        loss = loss - DECAY**number * (soft * drafts).sum(-1)[:, valid].mean()
        right.append((head.kept[drafts.argmax(-1)] == x.best)[:, valid].float().mean())
        hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
    return loss, torch.stack(right)


def fit(head: Head, model: Llama, examples: Examples, args: argparse.Namespace) -> None:
    """Train until the time is used up: the first half in one pass, then in all of them."""
    parts = optimizers(head, args.lr, "muon")
    held, train = examples[:HELD], examples[HELD:]
    began, step, limit = time.monotonic(), 0, args.minutes * 60
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.long)
    while (elapsed := time.monotonic() - began) < limit:
        if len(order) < args.batch:
            order = torch.randperm(len(train), generator=generator)
        batch, order = order[: args.batch], order[args.batch :]
        factor = min(1.0, (step + 1) / WARMUP_STEPS, 2 * (1 - elapsed / limit))
        for optimizer, share in zip(parts, (1.0, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = args.lr * share * factor
        loss, right = loss_of(head, model, train[batch], 1 if elapsed < limit / 2 else PASSES)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in parts:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % REPORT_STEPS == 0:
            report(f"step {step} seconds {elapsed:.0f}", loss, right)
            head.export(args.out)
    with torch.no_grad():
        report(f"{step} steps of {args.batch * LENGTH} tokens; held out:", *loss_of(head, model, held, PASSES))
    head.export(args.out)


def report(what: str, loss: Tensor, right: Tensor) -> None:
    """Print a loss, and how often the most likely id of each pass is the model's."""
    print(f"{what} loss {float(loss.detach()):.4f} right {' '.join(f'{x:.3f}' for x in right)}", flush=True)


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--artifact", type=Path, required=True, help="the model, compiled")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--sequences", type=int, default=600, help="generated sequences of 256 tokens")
    parser.add_argument("--text", type=Path, help="file (.npy) that keeps the generated sequences")
    parser.add_argument("--vocabulary", type=int, default=1536, help="ids that the head can draft")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--threads", type=int, help="threads of torch; fewer are faster on a machine with other jobs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.text and args.text.exists():
        rows = np.load(args.text)
    else:
        began = time.monotonic()
        rows = generated(args.artifact, args.sequences)
        print(f"generated {rows.size} tokens in {time.monotonic() - began:.0f} s", flush=True)
        if args.text:
            np.save(args.text, rows)
    counts = np.bincount(rows.ravel(), minlength=CONFIGS["main"].vocab_size)
    kept = np.sort(np.argsort(-counts, kind="stable")[: args.vocabulary])
    print(f"{len(kept)} ids are {counts[kept].sum() / counts.sum():.1%} of the tokens", flush=True)
    model = load(args.model, CONFIGS["main"], torch.device("cpu")).requires_grad_(False)
    head = Head(model, torch.from_numpy(kept))
    print(f"{sum(p.numel() for p in head.parameters())} parameters", flush=True)
    examples = prepared(model, torch.from_numpy(rows), head.kept)
    fit(head, model, examples, args)


if __name__ == "__main__":
    main()
