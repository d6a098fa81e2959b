#!/usr/bin/env python3
"""Compare a checkpoint of train_tiny.py, in float32, with transformers' DeepSeek-V3.2.

    python examples/check_tiny.py examples/tiny-model

Logits, short and longer than the indexer's top-k; greedy chat answers; and the MTP module's logits, whose decoder
layer is run by transformers from the same file. Exits with 1 when a figure is out of bounds.
"""

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny.checkpoint import hub_tensors, load
from tiny.config import Mode
from tiny.model import TinyModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32ForCausalLM, DeepseekV32RMSNorm
from transformers.utils import logging as transformers_logging

LIMIT = 1e-4
# Longer contexts: a router or an indexer that sees a tie broken otherwise by rounding changes a few positions.
EQUAL_SHARE = 0.97


def causal(count: int) -> Tensor:
    """[1, count, count] bool."""
    return torch.ones(1, count, count, dtype=torch.bool).tril()


def reference_mtp(folder: Path, hidden: Tensor, following: Tensor) -> Tensor:
    """Logits [1, S, V] of the MTP module's first step, with transformers' layers: the module is read from the file as
    the only (sparse) layer of a model that is fed eh_proj [enorm(embedding) | hnorm(hidden)]."""
    tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    cfg = DeepseekV32Config.from_pretrained(folder)
    prefix = f"model.layers.{cfg.num_hidden_layers}."
    cfg.num_hidden_layers, cfg.mlp_layer_types, cfg.layer_types = 1, ["sparse"], ["indexed_attention"]

    def norm(name: str, x: Tensor) -> Tensor:
        module = DeepseekV32RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        module.weight.data = tensors[prefix + name]
        return module(x)

    state = {k.replace(prefix, "model.layers.0."): v for k, v in tensors.items() if k.startswith(prefix)}
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        names = [f"model.layers.0.mlp.experts.{e}.{leaf}.weight" for e in range(cfg.n_routed_experts)]
        state[f"model.layers.0.mlp.experts.{leaf}"] = torch.stack([state.pop(name) for name in names])
    gate_up = [state.pop(f"model.layers.0.mlp.experts.{leaf}") for leaf in ("gate_proj", "up_proj")]
    state["model.layers.0.mlp.experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
    state["model.norm.weight"] = tensors[prefix + "shared_head.norm.weight"]
    own = ("enorm", "hnorm", "eh_proj", "shared_head")
    state = {k: v for k, v in state.items() if not k.startswith(tuple(f"model.layers.0.{name}." for name in own))}
    state["lm_head.weight"] = tensors["lm_head.weight"]
    state["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    model = DeepseekV32ForCausalLM(cfg).eval()
    model.load_state_dict(state)
    embedded = model.model.embed_tokens(following)
    joined = torch.cat((norm("enorm.weight", embedded), norm("hnorm.weight", hidden)), dim=-1)
    return model(inputs_embeds=joined @ tensors[prefix + "eh_proj.weight"].T).logits


@torch.no_grad()
def compare(folder: Path, model: TinyModel, theirs: DeepseekV32ForCausalLM, length: int) -> dict[str, Tensor]:
    """Largest difference of logits at each position [length] of a random sequence."""
    ids = torch.randint(7, model.cfg.vocab_size, (1, length + 1), generator=torch.Generator().manual_seed(length))
    allowed = causal(length)
    hidden = model(ids[:, :-1], allowed, Mode())
    (state,) = model.draft(hidden, ids[:, 1:], allowed, Mode(), 1)
    return {
        "logits": (model.lm_head(hidden) - theirs(ids[:, :-1]).logits).abs().amax((0, 2)),
        "mtp logits": (model.lm_head(state) - reference_mtp(folder, hidden, ids[:, 1:])).abs().amax((0, 2)),
    }


@torch.no_grad()
def chat(folder: Path, model: TinyModel, theirs: DeepseekV32ForCausalLM, text: str, limit: int) -> tuple[bool, str]:
    """A greedy answer by transformers' generate (cached), and whether plain full passes here give the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": text}]
    written = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    prompt = torch.tensor([tokenizer.encode(str(written), add_special_tokens=False)])
    answer = theirs.generate(prompt, max_new_tokens=limit, do_sample=False, temperature=None, top_p=None)
    mine = model.lm_head(model(answer[:, :-1], causal(answer.shape[1] - 1), Mode())).argmax(-1)
    same = torch.equal(mine[:, prompt.shape[1] - 1 :], answer[:, prompt.shape[1] :])
    return same, str(tokenizer.decode(answer[0, prompt.shape[1] :]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[20, 128, 300, 1000])
    folder, lengths = (args := parser.parse_args()).folder, args.lengths
    transformers_logging.set_verbosity_error()  # it reports the MTP module as unexpected: it has no use for it
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model, ok = load(folder), True
    saved = load_file(folder / "model.safetensors")
    again = hub_tensors(model)
    ok &= again.keys() == saved.keys() and all(torch.equal(again[name], saved[name]) for name in saved)
    print(f"{len(saved)} tensors, the same when written again: {ok}")
    for length in lengths:
        for name, difference in compare(folder, model, theirs, length).items():
            equal = (difference < LIMIT).float().mean().item()
            ok &= equal == 1 if length <= model.cfg.index_topk else equal >= EQUAL_SHARE
            print(
                f"{length} tokens, {name}: {equal:.2%} of positions within {LIMIT}, median difference "
                f"{difference.median():.1e}, largest {difference.max():.1e}"
            )
    for text in ("hi", "Genesis 1:1", "Tell me about Moses", "Continue: In the beginning"):
        same, answer = chat(folder, model, theirs, text, 120)
        ok &= same
        print(f"{text!r} -> {answer!r} (greedy tokens equal: {same})")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
