"""Structured output on the shipped model: answers obey their grammars, with drafts and without, and free ones are not
touched."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from serve.llm import LLM
from tests.engine.conftest import PROMPTS
from workers.bits import allowed_tokens
from workers.grammar_compiler import GrammarCompiler
from workers.step import SamplingParams

pytestmark = pytest.mark.slow

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 120},
        "sons": {"type": "array", "items": {"enum": ["Ham", "Shem", "Japheth"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "sons"],
}
PAGE_BYTES = 5 * 64 * (576 + 128) * 4


def tag(wanted: dict) -> str:
    return json.dumps({"type": "structural_tag", "format": wanted})


JSON_SCHEMA = tag({"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 2})
REGEX = tag({"type": "regex", "pattern": "[A-Z][a-z]{2,5} \\d{1,3}:\\d{1,3}"})
CHOICE = tag(
    {"type": "or", "elements": [{"type": "const_string", "value": v} for v in ("Moses", "Mary", "Methuselah")]}
)
EBNF = tag({"type": "grammar", "grammar": 'root ::= "a" root "b" | "ab"'})
THINKING = tag(
    {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "", "content": {"type": "any_text", "max_chars": 30}, "end": "</think>"},
            {"type": "regex", "pattern": "yes|no"},
        ],
    }
)
GRAMMARS = [JSON_SCHEMA, REGEX, CHOICE, EBNF, "", THINKING]


def requests() -> tuple[list[str], list[SamplingParams]]:
    """Every grammar greedily, seeded, and with what else changes logits; some answers are cut off."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "seed": 6, "top_p": 0.9, "repetition_penalty": 1.2},
        {"temperature": 0.0, "min_tokens": 12, "logprobs": 2},
    ]
    params = [SamplingParams(max_tokens=150, grammar=g, **kind) for kind in kinds for g in GRAMMARS]
    params += [SamplingParams(max_tokens=7, grammar=g, temperature=0.0) for g in GRAMMARS]
    return [PROMPTS[i % len(PROMPTS)] for i in range(len(params))], params


def check(text: str, grammar: str) -> None:
    """An answer that ended of itself."""
    if grammar == JSON_SCHEMA:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif grammar == REGEX:
        assert re.fullmatch(r"[A-Z][a-z]{2,5} \d{1,3}:\d{1,3}", text)
    elif grammar == CHOICE:
        assert text in ("Moses", "Mary", "Methuselah")
    elif grammar == EBNF:
        assert re.fullmatch("a+b+", text) and text.count("a") == text.count("b")
    elif grammar == THINKING:
        assert text.endswith(("yes", "no"))


def answers(llm: LLM) -> list[tuple[list[int], str, str]]:
    return [(done.token_ids, done.text, done.finish_reason) for done in llm.generate(*requests())]


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[tuple[list[int], str, str]]:
    return answers(llm)


def test_answers_obey(llm: LLM, plain: list) -> None:
    _, params = requests()
    ended = 0
    for one, (tokens, text, reason) in zip(params, plain, strict=True):
        assert reason == ("length" if len(tokens) == one.max_tokens and tokens[-1] != 1 else "stop")
        if reason == "stop":
            check(text, one.grammar)
            ended += one.grammar != ""
    assert ended >= 15


def test_free_answers_are_not_touched(llm: LLM, plain: list) -> None:
    prompts, params = requests()
    for prompt, one, answer in zip(prompts, params, plain, strict=True):
        if not one.grammar:
            alone = llm.generate([prompt], one)[0]
            assert (alone.token_ids, alone.text, alone.finish_reason) == answer


def test_greedy_takes_the_best_of_what_is_allowed(llm: LLM, plain: list, tiny_model: Path) -> None:
    import xgrammar

    compiler = GrammarCompiler(tiny_model, llm.plan.model.vocab_size, llm.plan.model.eos_token_ids)
    prompts, _ = requests()
    for i, grammar in enumerate(GRAMMARS):
        if not grammar:
            continue
        assert llm.tokenizer is not None
        prompt = llm.tokenizer.encode(prompts[i], add_special_tokens=True)
        tokens = plain[i][0]
        logits = llm.logits([prompt + tokens])[0][len(prompt) - 1 :]
        matcher = xgrammar.GrammarMatcher(compiler.compile(grammar))
        for token, row in zip(tokens, logits, strict=False):
            bits = xgrammar.allocate_token_bitmask(1, llm.plan.model.vocab_size)
            matcher.fill_next_token_bitmask(bits)
            allowed = allowed_tokens(bits[0], len(row)).numpy()
            assert allowed.any() and int(np.where(allowed, row, -np.inf).argmax()) == token
            assert matcher.accept_token(token)
    compiler.close()


@pytest.mark.parametrize(
    ("drafts", "settings"),
    [
        (1, {"max_num_seqs": 3, "kv_cache_bytes": 8 * PAGE_BYTES}),
        (3, {}),
        (2, {"max_inflight_steps": 1, "draft_policy": "adaptive"}),
        (2, {"tp": 2}),
        (0, {"kv_cache_bytes": 7 * PAGE_BYTES, "max_num_batched_tokens": 16}),
    ],
    ids=["1 in a small cache", "3", "adaptive", "tp 2", "none, in a small cache and chunks"],
)
def test_drafts_and_preemptions_change_nothing(tiny_model: Path, plain: list, drafts: int, settings: dict) -> None:
    common = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "draft_policy": "fixed"}
    with LLM(tiny_model, num_draft_tokens=drafts, **common | settings) as engine:
        assert answers(engine) == plain
        stats = engine.engine.stats
    assert stats is not None
    assert not drafts or sum(stats.accepted_per_position) > 0


def test_drafts_of_unseeded_requests_obey_too(tiny_model: Path) -> None:
    """Those are taken by rejection sampling, from what the grammar leaves of the target's distribution."""
    with LLM(tiny_model, num_draft_tokens=3, draft_policy="fixed", dtype="float32", device="cpu") as engine:
        params = [SamplingParams(max_tokens=200, grammar=g) for g in GRAMMARS if g]
        for one, done in zip(params * 4, engine.generate(PROMPTS[:5] * 4, params * 4), strict=True):
            if done.finish_reason == "stop":
                check(done.text, one.grammar)


def test_a_bad_grammar_fails_its_request_alone(llm: LLM) -> None:
    bad, good = llm.submit(PROMPTS[:2], [SamplingParams(grammar="{}"), SamplingParams(temperature=0)])
    assert len(good.result().token_ids) == 16
    with pytest.raises(Exception, match="grammar cannot be compiled"):
        bad.result()
