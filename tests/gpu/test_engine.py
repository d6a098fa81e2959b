"""The same engine on GPUs: oracles in float32, bf16's error, two ranks over NCCL, and the shipped model's text.

Skipped where torch finds no GPU.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from serve.llm import LLM
from tests.oracles import PromptReference, load_reference, oracle_folders
from workers.step import SamplingParams

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FOLDERS = oracle_folders() + oracle_folders(quantised=True)
TOLERANCE = 1e-4
PROMPTS = ["In the beginning God", "And the LORD said unto Moses,", "Blessed are the", "And David"]
CACHE = 256 << 20

every_oracle = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


def check_logits(llm: LLM, prompts: list[PromptReference]) -> None:
    for got, prompt in zip(llm.logits([prompt.ids for prompt in prompts]), prompts, strict=True):
        assert np.abs(got - prompt.logits.numpy()).max() <= TOLERANCE


@every_oracle
@pytest.mark.parametrize("chunk", [1024, 7])
def test_float32_logits(folder: Path, chunk: int) -> None:
    with LLM(folder, device="cuda", dtype="float32", kv_cache_bytes=CACHE, max_num_batched_tokens=chunk) as llm:
        check_logits(llm, load_reference(folder).prompts)


@every_oracle
@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks(folder: Path, ep: int) -> None:
    gpus(2)
    prompts = load_reference(folder).prompts
    with LLM(folder, tp=2, ep=ep, device="cuda", dtype="float32", kv_cache_bytes=CACHE) as llm:
        check_logits(llm, prompts)
        params = SamplingParams(temperature=0, max_tokens=len(prompts[0].greedy), ignore_eos=True)
        done = llm.generate([prompt.prompt for prompt in prompts], params)
    for completion, prompt in zip(done, prompts, strict=True):
        decided = prompt.num_decided(1e-3)
        assert completion.token_ids[:decided] == prompt.greedy[:decided]


def test_bfloat16_errs_no_more_than_transformers_on_a_cpu() -> None:
    """Mean error of the reference tokens' log-probabilities, over all oracles together: in one alone, a single token
    whose expert flips decides, and which tokens flip depends on the card's rounding."""
    ours, theirs = [], []
    for folder in FOLDERS:
        with LLM(folder, device="cuda", dtype="bfloat16", kv_cache_bytes=CACHE) as llm:
            for prompt in load_reference(folder).prompts:
                if prompt.logits_bf16 is not None:
                    (got,) = llm.logits([prompt.ids])
                    ours.append(_logprob_error(torch.from_numpy(got), prompt))
                    theirs.append(_logprob_error(prompt.logits_bf16, prompt))
    assert torch.cat(ours).mean() <= 1.2 * torch.cat(theirs).mean()


def _logprob_error(logits: torch.Tensor, prompt: PromptReference) -> torch.Tensor:
    targets = torch.tensor(prompt.ids[1:])[:, None]
    got, want = (rows[:-1].log_softmax(-1).gather(-1, targets) for rows in (logits, prompt.logits))
    return (got - want).abs().flatten()


def test_shipped_model_writes_the_same_text_as_on_a_cpu(tiny_model: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    seeded = SamplingParams(temperature=1, top_p=0.9, seed=5, max_tokens=60, ignore_eos=True)
    texts = []
    for tp, device in [(1, "cpu"), (1, "cuda"), (min(2, torch.cuda.device_count()), "cuda")]:
        with LLM(tiny_model, tp=tp, device=device, dtype="float32", kv_cache_bytes=CACHE) as llm:
            done = llm.generate(PROMPTS * 2, [greedy] * len(PROMPTS) + [seeded] * len(PROMPTS))
        texts.append([completion.token_ids for completion in done])
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


def test_the_cache_takes_the_memory_fraction(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cuda", kv_cache_memory_fraction=0.5) as llm:
        ready = llm.engine.started
        total = torch.cuda.get_device_properties(0).total_memory
        used = ready.num_pages * ready.page_bytes
    assert 0.4 * total < used < 0.5 * total


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_drafts_change_nothing(tiny_model: Path, drafts: int) -> None:
    """Greedy and seeded, short and past index_topk; and as many drafts are accepted as on a CPU."""
    prompts = [*PROMPTS, " ".join(PROMPTS * 12)]
    for params in (
        SamplingParams(temperature=0, max_tokens=90, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=5, top_p=0.9, max_tokens=60, ignore_eos=True),
    ):
        texts = []
        for count in (0, drafts):
            settings = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": CACHE, "draft_policy": "fixed"}
            with LLM(tiny_model, num_draft_tokens=count, **settings) as llm:
                texts.append([done.token_ids for done in llm.generate(prompts, params)])
                stats = llm.engine.stats
        assert texts[0] == texts[1]
        assert stats is not None
        assert sum(stats.accepted_per_position) / stats.verifications > (0.6, 1.0, 1.3)[drafts - 1]


@pytest.mark.parametrize("exchange", ["replicated", "leader", "sharded"])
def test_two_ranks_with_every_exchange(exchange: str) -> None:
    gpus(2)
    for folder in oracle_folders("deepseek_v32", "glm_moe_dsa"):
        settings = {"device": "cuda", "dtype": "float32", "kv_cache_bytes": CACHE}
        with LLM(folder, tp=2, topk_exchange=exchange, **settings) as llm:
            check_logits(llm, load_reference(folder).prompts)
