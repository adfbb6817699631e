"""Train a model on the token files for a given number of minutes.

    python train.py --config main --data WORK/tokens --out MODEL_DIR --minutes 3.3

The learning rate warms up, stays constant and falls linearly to zero over the
last part of the time, so a run of any length ends fully annealed.  With
``--teacher`` the loss also holds the divergence from a larger model's
predictions.  ``--state`` names a file from which an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import io
import lzma
import math
import time
from pathlib import Path

import numpy as np
import torch
from model import CONFIGS, Config, Llama, export, load
from optimizer import optimizers
from torch import Tensor
from torch.nn import functional as F

WARMUP_STEPS = 200
DECAY_SHARE = 0.5
SYNC_STEPS = 10
EVAL_SECONDS = 60.0


def read_tokens(path: Path, device: torch.device) -> Tensor:
    """Load a token stream (.npy, or .npy.xz next to it) onto the device."""
    if path.exists():
        array = np.load(path)
    else:
        array = np.load(io.BytesIO(lzma.decompress(Path(f"{path}.xz").read_bytes())))
    return torch.from_numpy(array.astype(np.int16)).to(device)


class Batches:
    """Endless batches of windows; every epoch is a new shift and a new order."""

    def __init__(self, tokens: Tensor, length: int, count: int, seed: int) -> None:
        self.tokens, self.length, self.count = tokens, length, count
        self.generator = torch.Generator(tokens.device).manual_seed(seed)
        self.span = torch.arange(length + 1, device=tokens.device)
        self.starts = torch.empty(0, dtype=torch.long, device=tokens.device)

    def _epoch(self) -> Tensor:
        device = self.tokens.device
        shift = int(torch.randint(self.length, (1,), generator=self.generator, device=device))
        windows = (len(self.tokens) - shift - 1) // self.length
        order = torch.randperm(windows, generator=self.generator, device=device)
        return order * self.length + shift

    def next(self) -> Tensor:
        """The next (count, length + 1) batch of token ids."""
        while len(self.starts) < self.count:
            self.starts = torch.cat((self.starts, self._epoch()))
        starts, self.starts = self.starts[: self.count], self.starts[self.count :]
        return self.tokens[starts[:, None] + self.span].long()


def loss_of(model: Llama, ids: Tensor, teacher: Llama | None) -> tuple[Tensor, Tensor]:
    """The training loss and the cross entropy of one batch."""
    logits = model(ids[:, :-1]).float().flatten(0, 1)
    entropy = F.cross_entropy(logits, ids[:, 1:].flatten())
    if teacher is None:
        return entropy, entropy
    with torch.no_grad():
        target = teacher(ids[:, :-1]).float().flatten(0, 1).softmax(-1)
    soft = F.cross_entropy(logits, target)
    return 0.3 * entropy + 0.7 * soft, entropy


def rate(step: int, progress: float) -> float:
    """The learning rate factor: warm-up, constant, linear decay to zero."""
    decay = min(1.0, (1.0 - progress) / DECAY_SHARE)
    return max(0.0, min((step + 1) / WARMUP_STEPS, 1.0) * decay)


@torch.no_grad()
def held_out_loss(model: Llama, tokens: Tensor, length: int) -> float:
    """Mean nats per token over the held-out stream, in windows."""
    windows = (len(tokens) - 1) // length
    total = 0.0
    for start in range(0, windows, 32):
        rows = torch.arange(start, min(start + 32, windows), device=tokens.device)
        ids = tokens[rows[:, None] * length + torch.arange(length + 1, device=tokens.device)].long()
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits = model(ids[:, :-1])
        total += float(F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    return total / (windows * length)


class Run:
    """A training run: model, optimizers, data and the clock."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.config: Config = CONFIGS[args.config]
        self.model = Llama(self.config, self.device)
        self.optimizers = optimizers(self.model, args.lr, args.optimizer)
        self.teacher = None
        if args.teacher:
            self.teacher = load(args.teacher, CONFIGS["main"], self.device).requires_grad_(False)
        self.train = read_tokens(args.data / "train.npy", self.device)
        self.held = read_tokens(args.data / "held.npy", self.device)
        self.batches = Batches(self.train, args.length, args.batch, args.seed)
        self.loss = torch.compile(loss_of) if args.compile else loss_of
        self.step, self.elapsed = 0, 0.0
        self.restore()

    def restore(self) -> None:
        """Continue from the state file when there is one."""
        if not self.args.state or not self.args.state.exists():
            return
        state = torch.load(self.args.state, map_location=self.device)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.elapsed = state["step"], state["elapsed"]
        self.batches.generator.manual_seed(self.args.seed + self.step)

    def save(self) -> None:
        """Write the checkpoint, and the state file when one is named."""
        export(self.model, self.args.out)
        if self.args.state:
            torch.save(
                {
                    "model": self.model.state_dict(),
                    "step": self.step,
                    "optimizers": [o.state_dict() for o in self.optimizers],
                    "elapsed": self.elapsed,
                },
                self.args.state,
            )

    def update(self, progress: float) -> Tensor:
        """One optimizer step; returns the cross entropy."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.args.lr * rate(self.step, progress)
        with torch.autocast(self.device.type, torch.bfloat16):
            loss, entropy = self.loss(self.model, self.batches.next(), self.teacher)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return entropy.detach()

    def report(self, entropy: float) -> None:
        """Print the state of the run."""
        tokens = self.step * self.args.batch * self.args.length
        held = held_out_loss(self.model, self.held, self.args.length)
        print(
            f"step {self.step} tokens {tokens / 1e6:.0f}M seconds {self.elapsed:.0f} "
            f"rate {tokens / max(self.elapsed, 1e-9) / 1e6:.2f}M/s "
            f"train {entropy:.4f} held {held:.4f} nats/token",
            flush=True,
        )

    def fit(self) -> None:
        """Train until the time is used up; compilation is not counted."""
        limit = self.args.minutes * 60
        for _ in range(2 if self.step == 0 else 0):
            self.update(0.0)
        mark, next_report = time.monotonic(), self.elapsed + EVAL_SECONDS
        while self.elapsed < limit:
            entropy = self.update(self.elapsed / limit)
            if self.step % SYNC_STEPS == 0:
                value = float(entropy)  # waits for the device
                if not math.isfinite(value):
                    raise FloatingPointError(f"loss is {value} at step {self.step}")
                now = time.monotonic()
                self.elapsed, mark = self.elapsed + now - mark, now
                if self.elapsed >= next_report:
                    next_report += EVAL_SECONDS
                    self.report(value)
                    self.save()
                    mark = time.monotonic()
        self.report(float(entropy))
        self.save()


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", choices=CONFIGS, default="main")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--batch", type=int, default=96, help="sequences in a step")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--state", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    started = time.monotonic()
    run = Run(parser.parse_args())
    parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{parameters} parameters, {len(run.train)} training tokens", flush=True)
    run.fit()
    print(f"wall time {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
