#!/usr/bin/env python3
"""Train the small DeepSeek-V3.2 that Shoal ships (examples/tiny-model), with its MTP module.

    python examples/train_tiny.py --out /tmp/tiny-model --minutes 5          # one H200
    python examples/train_tiny.py --out /tmp/mini --preset mini --minutes 2  # two CPU cores, to see it work
    python examples/train_tiny.py --evaluate examples/tiny-model             # figures of a checkpoint

Three phases. (1) Trunk, MTP module and indexers learn from text, with attention dense: the MTP module is unrolled, and
the indexers follow the attention they will stand in for (arXiv 2512.02556, "dense warm-up", at the same time here).
(2) The same with attention restricted to what the indexers select. (3) The trunk is frozen and writes; the MTP module
learns to foresee it. Needs torch, tokenizers, safetensors, numpy. Writes the checkpoint and train_log.json.
"""

import argparse
import contextlib
import json
import math
import platform
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tiny.checkpoint import load, save
from tiny.config import PRESETS, Mode
from tiny.data import LOOKAHEAD, Corpus, build_corpus
from tiny.evaluate import answers, held_out_losses, report, write
from tiny.model import Gate, TinyModel
from tiny.objective import Losses, drafting_losses, language_losses
from torch import Tensor, nn

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Recipe:
    """Everything that shapes a run. Phases end by steps or by time, whichever comes first."""

    preset: str
    minutes: float  # of all phases together
    steps: int  # of phases 1 and 2; more than ~40 epochs of this small text is learned by heart
    main_share: float = 0.7  # of the time, at most, for phases 1 and 2
    sparse_share: float = 0.3  # of phases 1 and 2, for phase 2
    batch: int = 32
    context: int = 1024
    lr: float = 4e-3
    draft_lr: float = 1.5e-3
    warmup: int = 100
    floor: float = 0.02  # of the learning rate, at the end
    weight_decay: float = 0.1
    dropout: float = 0.15
    mtp_weight: float = 1.5  # of all MTP steps together, against 1 for the trunk
    teach_every: int = 2
    bias_rate: float = 2e-3
    chat_share: float = 0.25  # of the tokens
    chats: int = 40000
    own_rows: int = 1024  # rows the trunk writes at a time in phase 3
    own_passes: int = 4  # over each of these
    log_every: int = 50
    seed: int = 0


def recipe_for(args: argparse.Namespace) -> Recipe:
    """The recipe of a preset: "tiny" as shipped, "mini" for a CPU."""
    recipe = Recipe(args.preset, args.minutes, args.steps, seed=args.seed)
    if args.preset == "mini":
        return replace(recipe, batch=8, context=128, warmup=20, chats=2000, own_rows=32, log_every=40)
    return recipe


class Optimizer:
    """AdamW with a warm-up and cosine schedule. Indexers are clipped apart from what learns language."""

    def __init__(self, module: nn.Module, lr: float, recipe: Recipe) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.parts = [[p for name, p in named if ("indexer" in name) == indexer] for indexer in (False, True)]
        decayed = [p for name, p in named if p.ndim > 1 and "embed" not in name]
        others = [p for name, p in named if p.ndim <= 1 or "embed" in name]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=others[0].is_cuda)
        self.lr, self.warmup, self.floor, self.taken = lr, recipe.warmup, recipe.floor, 0

    def step(self, loss: Tensor, progress: float) -> float:
        """One update; progress in 0..1 places it on the cosine. Returns the learning rate used."""
        cosine = self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        rate = self.lr * min(1.0, (self.taken + 1) / self.warmup) * cosine
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        for part in self.parts:
            nn.utils.clip_grad_norm_(part, 1.0)
        self.adam.step()
        self.taken += 1
        return rate


@dataclass
class Log:
    """The loss curve, with the clock."""

    recipe: Recipe
    start: float = field(default_factory=time.perf_counter)
    entries: list[dict[str, Any]] = field(default_factory=list)
    tokens: int = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def note(self, phase: str, step: int, losses: Losses, **more: Any) -> None:
        """Print and keep a line (waits for the device)."""
        token, index = [round(x, 4) for x in losses.token.tolist()], losses.indexer.item()
        entry = {"phase": phase, "step": step, "loss": token, **more, "seconds": round(self.seconds, 1)}
        if index:
            entry["index_kl"] = round(index, 4)
        self.entries.append(entry)
        print(json.dumps(entry), flush=True)


class Trainer:
    """Runs the phases on one device."""

    def __init__(self, recipe: Recipe, corpus: Corpus, device: str) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.corpus, self.device = recipe, corpus, device
        self.model = TinyModel(PRESETS[recipe.preset], recipe.dropout).to(device)
        self.held_out = corpus.held_out_rows(recipe.context)[:32].to(device)
        self.gates = {name: m for name, m in self.model.named_modules() if isinstance(m, Gate)}
        self.log = Log(recipe)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """bf16 arithmetic on a GPU, float32 on a CPU; weights are float32 in both."""
        return torch.autocast(self.device, torch.bfloat16) if self.device == "cuda" else contextlib.nullcontext()

    def learn_text(self) -> None:
        """Phases 1 and 2."""
        recipe, model, log = self.recipe, self.model, self.log
        optimizer, budget = Optimizer(model, recipe.lr, recipe), recipe.minutes * 60 * recipe.main_share
        progress = 0.0
        batches = self.corpus.batches(recipe.batch, recipe.context, recipe.chat_share, recipe.seed)
        for step, ids in enumerate(batches):
            mode = Mode(sparse=progress >= 1 - recipe.sparse_share, teach=step % recipe.teach_every == 0)
            model.train()
            with self.autocast():
                losses = language_losses(model, ids.to(self.device, non_blocking=True), mode)
            rate = optimizer.step(
                losses.token[0] + recipe.mtp_weight * losses.token[1:].mean() + losses.indexer, progress
            )
            for gate in self.gates.values():
                gate.balance(recipe.bias_rate)
            log.tokens += recipe.batch * recipe.context
            if step % recipe.log_every == 0:
                with self.autocast():
                    held = [round(x, 4) for x in held_out_losses(model, self.held_out)]
                log.note("sparse" if mode.sparse else "dense", step, losses, held_out=held, lr=round(rate, 6))
            progress = max(log.seconds / budget, (step + 1) / recipe.steps)
            if progress >= 1:
                return

    def learn_to_draft(self) -> None:
        """Phase 3, until the time is up."""
        recipe, model, log = self.recipe, self.model, self.log
        model.requires_grad_(False).eval()
        model.mtp.requires_grad_(True)
        optimizer = Optimizer(model.mtp, recipe.draft_lr, recipe)
        start, random, step = log.seconds, Random(recipe.seed + 1), 0
        prompts = self.corpus.prompts(random, held_out=False)
        budget = max(recipe.minutes * 60 - start, 1.0)
        while log.seconds - start < budget:
            model.eval()
            with self.autocast():
                own, _ = write(model, prompts, recipe.own_rows, recipe.context + LOOKAHEAD)
            model.mtp.train()
            for _ in range(recipe.own_passes):
                for ids in own[torch.randperm(len(own), device=own.device)].split(recipe.batch):
                    progress = (log.seconds - start) / budget
                    if progress >= 1:
                        return
                    with self.autocast():
                        losses = drafting_losses(model, ids, Mode(teach=step % recipe.teach_every == 0))
                    rate = optimizer.step(losses.token.mean() + losses.indexer, progress)
                    self.gates[f"model.layers.{model.cfg.num_hidden_layers}.mlp.gate"].balance(recipe.bias_rate)
                    if step % recipe.log_every == 0:
                        log.note("draft", step, losses, lr=round(rate, 6))
                    step += 1

    def figures(self) -> dict[str, Any]:
        """Held-out figures of the model as it is now."""
        recipe = self.recipe
        rows, length = min(recipe.own_rows, 64), min(recipe.context, 512) + LOOKAHEAD
        with self.autocast():
            return report(self.model, self.corpus, recipe.context, rows, length)

    def answers(self) -> dict[str, str]:
        """Greedy answers to a few questions."""
        with self.autocast():
            return answers(self.model, self.corpus.tokenizer)


def train(recipe: Recipe, corpus: Corpus, tokenizer_file: Path, out: Path, device: str) -> dict[str, Any]:
    """All phases; writes the checkpoint and train_log.json to `out`; returns the figures."""
    trainer = Trainer(recipe, corpus, device)
    trainer.learn_text()
    before, seconds = trainer.figures(), trainer.log.seconds
    save(trainer.model, tokenizer_file, out)  # should the last phase fail, this is worth having
    trainer.learn_to_draft()
    size = save(trainer.model, tokenizer_file, out)
    trainer.model = load(out, device)  # the figures are of the weights as saved, in bf16
    result = {
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "checkpoint_bytes": size,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU",
        "torch": torch.__version__,
        "tokens_seen": trainer.log.tokens,
        "epochs": round(trainer.log.tokens * (1 - recipe.chat_share) / corpus.tokens, 1),
        "seconds": round(trainer.log.seconds, 1),
        "seconds_before_drafting": round(seconds, 1),
        "before_drafting": before,
        **trainer.figures(),
        "answers": trainer.answers(),
    }
    log = {"recipe": asdict(recipe), "result": result, "log": trainer.log.entries}
    (out / "train_log.json").write_text(json.dumps(log, indent=1, ensure_ascii=False) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for the checkpoint")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="only print the figures of a checkpoint")
    parser.add_argument("--corpus", type=Path, default=HERE / "corpus" / "corpus.txt.gz")
    parser.add_argument("--tokenizer", type=Path, default=HERE / "tiny-model" / "tokenizer.json",
                        help="tokenizer.json; trained and written there when absent")  # fmt: skip
    parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training; evaluation comes on top")
    parser.add_argument("--steps", type=int, default=1000, help="most steps of phases 1 and 2")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out is None) == (args.evaluate is None):
        parser.error("give either --out or --evaluate")
    torch.set_float32_matmul_precision("high")
    device, recipe = "cuda" if torch.cuda.is_available() else "cpu", recipe_for(args)
    corpus = build_corpus(args.corpus, args.tokenizer, PRESETS[args.preset].vocab_size, recipe.chats, recipe.seed)
    if args.evaluate:
        trainer = Trainer(recipe, corpus, device)
        trainer.model = load(args.evaluate, device)
        result = {**trainer.figures(), "answers": trainer.answers()}
    else:
        result = train(recipe, corpus, args.tokenizer, args.out, device)
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
