"""Checkpoints in the layout of DeepSeek's releases on Hugging Face: bf16 safetensors, config, tokenizer."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tiny.config import TinyConfig
from tiny.model import Experts, TinyModel

BOS, EOS, PAD, USER, ASSISTANT = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
)
SPECIAL_TOKENS = [BOS, EOS, PAD, USER, ASSISTANT, "<think>", "</think>"]  # in the order of their ids
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "intermediate_size", "moe_intermediate_size", "n_routed_experts",
    "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_topk", "vocab_size", "first_k_dense_replace",
    "routed_scaling_factor", "rms_norm_eps", "rope_theta",
)  # fmt: skip


def hub_config(cfg: TinyConfig) -> dict[str, Any]:
    """config.json as the DeepSeek-V3.2 releases write it."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **{name: getattr(cfg, name) for name in SIZES},
        "num_key_value_heads": cfg.num_attention_heads,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": int(cfg.rope_factor * cfg.original_max_position_embeddings),
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "num_nextn_predict_layers": 1,
        "ep_size": 1,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "type": "yarn",
            "factor": cfg.rope_factor,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": cfg.original_max_position_embeddings,
        },
    }


def read_config(folder: Path) -> TinyConfig:
    """The sizes in a folder's config.json."""
    raw = json.loads((folder / "config.json").read_text())
    rope = raw["rope_scaling"]
    return TinyConfig(
        **{name: raw[name] for name in SIZES},
        rope_factor=rope["factor"],
        original_max_position_embeddings=rope["original_max_position_embeddings"],
    )


def hub_tensors(model: TinyModel) -> dict[str, Tensor]:
    """The checkpoint's tensors: bf16, but float32 for the routers' biases; one tensor for each expert's matrix."""
    stacked = {name for name, module in model.named_modules() if isinstance(module, Experts)}
    out: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        parent, leaf = name.rsplit(".", 1)
        if parent in stacked:
            for e, matrix in enumerate(value):
                out[f"{parent}.{e}.{leaf}.weight"] = matrix.bfloat16().cpu().contiguous()
        else:
            out[name] = value.to(torch.float32 if "correction_bias" in leaf else torch.bfloat16).cpu().contiguous()
    return out


def save(model: TinyModel, tokenizer_file: Path, folder: Path) -> int:
    """Write model, config and tokenizer into the folder; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hub_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    sampling = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    ids = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": hub_config(model.cfg)["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in {
        "config.json": hub_config(model.cfg),
        "generation_config.json": {"_from_model_config": True, **ids, **sampling},
        "tokenizer_config.json": tokenizer,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    if tokenizer_file.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copy(tokenizer_file, folder / "tokenizer.json")
    return (folder / "model.safetensors").stat().st_size


def load(folder: Path, device: str = "cpu") -> TinyModel:
    """The model of a folder written by `save`, in float32. Raises RuntimeError when tensors are missing or unknown."""
    model = TinyModel(read_config(folder))
    tensors = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                parts = [tensors.pop(f"{name}.{e}.{leaf}.weight") for e in range(len(module.gate_proj))]
                tensors[f"{name}.{leaf}"] = torch.stack(parts)
    model.load_state_dict(tensors)
    return model.to(device).eval()
