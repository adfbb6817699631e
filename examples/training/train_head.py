"""Train an EAGLE-3 head for a model on text that the model itself generates.

    python generate.py --model MODEL_DIR --out TEXT.npz
    python train_head.py --model MODEL_DIR --text TEXT.npz --out HEAD_DIR --minutes 3

The head learns the model's distribution of the token after next, over the most
frequent ids, in as many passes as it drafts tokens.  With --start it continues
from a head that was trained before.  On a GPU, a training step is one CUDA
graph.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path

import torch
from generate import Text
from head import Head, features
from model import CONFIGS, Llama, load
from optimizer import optimizers
from torch import Tensor
from torch.nn import functional as F

HELD = 512  # sequences that are not trained on
WARMUP_STEPS, SYNC_STEPS, EVAL_SECONDS = 50, 20, 40.0
OTHER_RATE = 0.2  # of the learning rate, for the output matrix and the norms
PASSES, DECAY = 4, 0.8  # simulated drafts, and how much less each one counts than the one before
FLOOR = 0.25  # weight of a draft whose predecessors were rejected, with --reached
BEGIN = 16  # positions of a sequence that reports leave out


def loss_of(head: Head, model: Llama, ids: Tensor, hard: Tensor, reached: bool) -> tuple[Tensor, list[Tensor]]:
    """The loss of all passes, and where each pass's most likely id is the model's, bool[batch, length - 1].

    hard: the weight of the model's most likely token in the targets of each sequence, f32[batch]; that of its
    distribution is the rest. reached: a draft counts by the probability that all drafts before it are accepted, but at
    least FLOOR; otherwise by DECAY alone.
    """
    joined, logits = features(model, ids)
    target = logits[:, 1:]  # of token i + 2, as position i of the head predicts it
    soft, best = target.float().softmax(-1)[..., head.kept], target.argmax(-1)
    wanted = torch.lerp(soft, (head.kept == best[..., None]).to(soft), hard[:, None, None])
    embedding, hidden = model.model.embed_tokens(ids[:, 1:]), head.fc(joined[:, :-1])
    cos, sin = model.cos[: ids.shape[1] - 1], model.sin[: ids.shape[1] - 1]
    passes: list[tuple[Tensor, Tensor]] = []
    loss, right = torch.zeros((), device=ids.device), []
    weight = torch.ones_like(best, dtype=torch.float32)
    for number in range(PASSES):
        hidden = head.midlayer(embedding, hidden, cos, sin, passes)
        drafts = head.lm_head(head.norm(hidden)).float().log_softmax(-1)
        valid = slice(number, None)  # earlier positions lack the hidden state of the pass before
        entropy = -(wanted * drafts).sum(-1)
        loss = loss + DECAY**number * (weight * entropy)[:, valid].mean()
        right.append(head.kept[drafts.argmax(-1)] == best)
        if reached:
            with torch.no_grad():  # the next pass drafts the token after this pass's, one position later
                accepted = torch.minimum(wanted, drafts.exp()).sum(-1)
                weight = F.pad(weight * accepted, (1, 0))[:, :-1].clamp(min=FLOOR)
        hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
    return loss, right


class Trainer:
    """Training steps of a head, and the running mean of its weights.

    The learning rates, the weight of the mean and the batch are tensors, which a captured step reads.
    """

    def __init__(self, head: Head, model: Llama, text: Text, args: argparse.Namespace) -> None:
        device = text.ids.device
        self.head, self.model, self.text, self.args, self.mean = head, model, text, args, copy.deepcopy(head)
        self.parts = optimizers(head, args.lr, "muon", captured=True)
        self.rates = [torch.zeros((), device=device) for _ in self.parts]
        for optimizer, rate in zip(self.parts, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
        self.picked = torch.zeros(args.batch, dtype=torch.long, device=device)
        self.new_share = torch.zeros((), device=device)  # of the last weights in the mean
        self.loss = torch.zeros((), device=device)
        self.count, self._update = 0, captured(self._eager) if device.type == "cuda" else self._eager

    def step(self, picked: Tensor, factor: float) -> None:
        """Train on these sequences with this share of the learning rate."""
        self.picked.copy_(picked)
        for rate, share in zip(self.rates, (1.0, OTHER_RATE), strict=True):
            rate.fill_(self.args.lr * share * factor)
        self.new_share.fill_(1 - min(self.args.average, (self.count + 1) / (self.count + 6)))
        self._update()
        self.count += 1

    def _eager(self) -> None:
        for optimizer in self.parts:
            optimizer.zero_grad(set_to_none=True)
        loss, _ = self.loss_of(self.head, self.picked, self.args.hard)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.parts:
            optimizer.step()
        self.loss.copy_(loss.detach())
        with torch.no_grad():
            for average, weight in zip(self.mean.parameters(), self.head.parameters(), strict=True):
                average.lerp_(weight, self.new_share)

    def loss_of(self, head: Head, picked: Tensor, hard: float) -> tuple[Tensor, list[Tensor]]:
        """Return what the function `loss_of` does, for these sequences."""
        ids, greedy = self.text.ids[picked].long(), self.text.temperature[picked] == 0
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            return loss_of(head, self.model, ids, hard * greedy, self.args.reached)

    @torch.no_grad()
    def report(self, what: str) -> None:
        """Print what the mean of the weights gives for the sequences that are not trained on, and write it."""
        held = torch.arange(HELD, device=self.picked.device).split(64)
        losses, rights = zip(*(self.loss_of(self.mean, part, 0.0) for part in held), strict=True)
        right = [torch.cat(each) for each in zip(*rights, strict=True)]
        greedy, prose = self.text.temperature[:HELD] == 0, self.text.prose[:HELD]
        kinds = {"all": prose | ~prose, "prose, greedy": prose & greedy, "prose, sampled": prose & ~greedy}
        kinds |= {"chats, greedy": ~prose & greedy, "chats, sampled": ~prose & ~greedy}
        cells = [f"{name}: {score([x[rows] for x in right])}" for name, rows in kinds.items()]
        print(f"{what} loss {sum(map(float, losses)) / len(losses):.4f}; {'; '.join(cells)}", flush=True)
        self.mean.export(self.args.out / f"step-{self.count}" if self.args.keep else self.args.out)


def captured(update: Callable[[], None]) -> Callable[[], None]:
    """Return an update as one CUDA graph. It is run first, with learning rates of 0, to allocate states."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update()
    return graph.replay


def score(right: list[Tensor]) -> str:
    """How often each pass's most likely id is the model's, and the tokens of a step in greedy decoding."""
    right = [x[:, BEGIN:] for x in right]
    length = right[0].shape[1] - PASSES if len(right[0]) else 0
    if not length:
        return "none"
    chain = torch.stack([x[:, n : n + length] for n, x in enumerate(right)]).float().cumprod(0)
    shares = " ".join(f"{float(x.float().mean()):.4f}" for x in right)
    return f"{shares} tokens a step {float(1 + chain.mean((1, 2)).sum()):.4f}"


def fit(trainer: Trainer, args: argparse.Namespace) -> None:
    """Train until the time is used up; the learning rate decays linearly from the share `args.decay` of the time on."""
    count, device = len(trainer.text.ids) - HELD, trainer.picked.device
    generator = torch.Generator(device).manual_seed(args.seed)
    order = torch.empty(0, dtype=torch.long, device=device)
    trainer.report("at first")
    began, elapsed, limit, next_report = time.monotonic(), 0.0, args.minutes * 60, EVAL_SECONDS
    while elapsed < limit:
        for _ in range(SYNC_STEPS):
            if len(order) < args.batch:
                order = HELD + torch.randperm(count, generator=generator, device=device)
            picked, order = order[: args.batch], order[args.batch :]
            decay = min(1.0, (1 - elapsed / limit) / max(1 - args.decay, 1e-9))
            trainer.step(picked, min((trainer.count + 1) / WARMUP_STEPS, decay))
        loss = float(trainer.loss)  # waits for the device
        if loss != loss:
            raise FloatingPointError(f"the loss is not a number at step {trainer.count}")
        elapsed = time.monotonic() - began
        if elapsed >= next_report:
            trainer.report(f"step {trainer.count} seconds {elapsed:.0f} loss {loss:.4f}; held out:")
            next_report += EVAL_SECONDS
    trainer.report(f"{trainer.count} steps of {args.batch * trainer.text.ids.shape[1]} tokens; held out:")


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="file that generate.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.0, help="training time")
    parser.add_argument("--start", type=Path, help="folder of a head to continue from")
    parser.add_argument("--hard", type=float, default=0.5, help="weight of the likeliest token in greedy sequences")
    parser.add_argument("--reached", action="store_true", help="weigh drafts by the probability that they are reached")
    parser.add_argument("--average", type=float, default=0.998, help="weight of the past in the mean of the weights")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the time after which the rate decays")
    parser.add_argument("--keep", action="store_true", help="write each checkpoint to a folder of its own in --out")
    parser.add_argument("--vocabulary", type=int, default=2048, help="ids that the head can draft")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device(args.device)
    model = load(args.model, CONFIGS["main"], device).requires_grad_(False)
    text = Text.read(args.text, device)
    if (needed := HELD + args.batch) > len(text.ids):
        parser.error(f"--text has {len(text.ids)} sequences; {needed} are needed, {HELD} of them held out")
    counts = torch.bincount(text.ids.flatten().int(), minlength=CONFIGS["main"].vocab_size)
    kept = counts.argsort(descending=True, stable=True)[: args.vocabulary].sort().values
    head = (Head.read(args.start, model) if args.start else Head(model, kept)).to(device)
    print(f"{len(head.kept)} ids are {float(counts[head.kept].sum() / counts.sum()):.1%} of the tokens", flush=True)
    print(f"{sum(p.numel() for p in head.parameters())} parameters", flush=True)
    fit(Trainer(head, model, text, args), args)


if __name__ == "__main__":
    main()
