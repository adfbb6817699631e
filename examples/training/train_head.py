"""Train an EAGLE-3 head for a model on text that the model itself generates.

    python train_head.py --model MODEL_DIR --out HEAD_DIR --minutes 2

The text needs no corpus: the model continues documents and chats of its own,
greedily and at temperatures 0.7 and 1.  The head learns the model's distribution
of the token after next, over the most frequent ids, in as many passes as it
drafts tokens.  With --start it continues from a head that was trained before, in
all passes from the beginning.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch
from generate import Shares, generated
from head import Head, features
from model import CONFIGS, Llama, load
from optimizer import optimizers
from torch import Tensor
from torch.nn import functional as F

TOGETHER = 2048  # sequences that are generated at once
HELD = 64  # sequences that are not trained on
WARMUP_STEPS, REPORT_STEPS = 50, 100
OTHER_RATE = 0.2  # of the learning rate, for the output matrix and the norms
PASSES, DECAY = 4, 0.8  # simulated drafts, and how much less each one counts than the one before
FIRST = 0.3  # share of the time in which only the first draft is simulated


def loss_of(head: Head, model: Llama, ids: Tensor, hard: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The loss of `count` passes, and the share of each pass's most likely ids that are the model's.

    hard: the weight of the model's most likely token in the targets of each sequence, f32[batch]; that of its
    distribution is the rest.
    """
    joined, logits = features(model, ids)
    target = logits[:, 1:]  # of token i + 2, as position i of the head predicts it
    soft, best = target.float().softmax(-1)[..., head.kept], target.argmax(-1)
    wanted = torch.lerp(soft, (head.kept == best[..., None]).to(soft), hard[:, None, None])
    embedding, hidden = model.model.embed_tokens(ids[:, 1:]), head.fc(joined[:, :-1])
    cos, sin = model.cos[: ids.shape[1] - 1], model.sin[: ids.shape[1] - 1]
    passes: list[tuple[Tensor, Tensor]] = []
    loss, right = torch.zeros((), device=ids.device), []
    for number in range(count):
        hidden = head.midlayer(embedding, hidden, cos, sin, passes)
        drafts = head.lm_head(head.norm(hidden)).float().log_softmax(-1)
        valid = slice(number, None)  # earlier positions lack the hidden state of the pass before
        loss = loss - DECAY**number * (wanted * drafts).sum(-1)[:, valid].mean()
        right.append((head.kept[drafts.argmax(-1)] == best)[:, valid].float().mean())
        hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
    return loss, torch.stack(right)


def fit(head: Head, model: Llama, rows: Tensor, hard: Tensor, args: argparse.Namespace) -> None:
    """Train until the time is used up: at first in one pass, unless the head is trained already, then in all of them.

    What is written is the running mean of the weights.
    """
    parts, device, mean = optimizers(head, args.lr, "muon"), rows.device, copy.deepcopy(head)
    held, first = rows[:HELD], 0.0 if args.start else FIRST
    began, step, limit = time.monotonic(), 0, args.minutes * 60
    generator = torch.Generator().manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.long)
    while (elapsed := time.monotonic() - began) < limit:
        if len(order) < args.batch:
            order = torch.randperm(len(rows) - HELD, generator=generator)
        batch, order = order[: args.batch], order[args.batch :]
        factor = min(1.0, (step + 1) / WARMUP_STEPS, 2 * (1 - elapsed / limit))
        for optimizer, share in zip(parts, (1.0, OTHER_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = args.lr * share * factor
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            picked = HELD + batch.to(device)
            loss, right = loss_of(head, model, rows[picked], hard[picked], 1 if elapsed < first * limit else PASSES)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in parts:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            for average, weight in zip(mean.parameters(), head.parameters(), strict=True):
                average.lerp_(weight, 1 - min(args.average, step / (step + 5)))
        if step % REPORT_STEPS == 0:
            report(f"step {step} seconds {elapsed:.0f}", loss, right)
            mean.export(args.out)
    with torch.no_grad():
        final = loss_of(mean, model, held, torch.zeros_like(hard[:HELD]), PASSES)
        report(f"{step} steps of {args.batch * args.length} tokens; held out:", *final)
    mean.export(args.out)


def report(what: str, loss: Tensor, right: Tensor) -> None:
    """Print a loss, and how often the most likely id of each pass is the model's."""
    print(f"{what} loss {float(loss.detach()):.4f} right {' '.join(f'{x:.3f}' for x in right)}", flush=True)


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=2.0, help="of training, after the text is generated")
    parser.add_argument("--sequences", type=int, default=32768, help="generated sequences")
    parser.add_argument("--length", type=int, default=320, help="tokens of a sequence")
    parser.add_argument("--start", type=Path, help="folder of a head to continue from")
    for name, share in vars(Shares()).items():
        parser.add_argument(f"--{name}", type=float, default=share, help="share of such sequences (see generate.py)")
    parser.add_argument("--hard", type=float, default=0.0, help="weight of the likeliest token in greedy sequences")
    parser.add_argument("--average", type=float, default=0.0, help="weight of the past in the mean of the weights")
    parser.add_argument("--vocabulary", type=int, default=2048, help="ids that the head can draft")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    model = load(args.model, CONFIGS["main"], device).requires_grad_(False)
    generator, began = torch.Generator(device).manual_seed(args.seed), time.monotonic()
    sizes = [min(TOGETHER, args.sequences - at) for at in range(0, args.sequences, TOGETHER)]
    shares = Shares(args.prose, args.greedy, args.cool)
    parts = [generated(model, size, args.length, generator, shares) for size in sizes]
    rows, greedy = (torch.cat(part) for part in zip(*parts, strict=True))
    print(f"generated {rows.numel()} tokens in {time.monotonic() - began:.0f} s", flush=True)
    counts = torch.bincount(rows.flatten(), minlength=CONFIGS["main"].vocab_size)
    kept = counts.argsort(descending=True, stable=True)[: args.vocabulary].sort().values
    head = (Head.read(args.start, model) if args.start else Head(model, kept)).to(device)
    print(f"{len(head.kept)} ids are {float(counts[head.kept].sum() / counts.sum()):.1%} of the tokens", flush=True)
    print(f"{sum(p.numel() for p in head.parameters())} parameters", flush=True)
    fit(head, model, rows, args.hard * greedy, args)


if __name__ == "__main__":
    main()
