"""The shipped model writes what transformers writes with the same checkpoint."""

from pathlib import Path

import pytest
import torch

from serve.llm import LLM
from tests.engine.conftest import PROMPTS
from workers.step import SamplingParams

pytestmark = pytest.mark.slow

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def expected(tiny_model: Path, llm: LLM) -> list[list[int]]:
    """transformers' greedy continuations of PROMPTS in float32."""
    from transformers import AutoModelForCausalLM

    assert llm.tokenizer is not None
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([llm.tokenizer.encode(prompt, add_special_tokens=True)])
        whole = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=2)
        outputs.append(whole[0, ids.shape[1] :].tolist())
    return outputs


def test_greedy_text_equals_transformers(llm: LLM, expected: list[list[int]]) -> None:
    done = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
    assert [completion.token_ids for completion in done] == expected
    assert llm.tokenizer is not None
    texts = [llm.tokenizer.decode(ids, skip_special_tokens=True) for ids in expected]
    assert [completion.text for completion in done] == texts


@pytest.mark.parametrize("ep", [1, 2])
def test_two_ranks_write_the_same(tiny_model: Path, expected: list[list[int]], ep: int) -> None:
    with LLM(tiny_model, tp=2, ep=ep, dtype="float32", device="cpu") as two:
        done = two.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NEW_TOKENS))
    assert [completion.token_ids for completion in done] == expected
