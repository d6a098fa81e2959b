"""A model without tensors: executes step plans by the book and notices every wrong page, slot or position."""

from array import array
from dataclasses import dataclass, field
from zlib import crc32

from configs.engine import PAGE_SIZE
from serve.driver.messages import AddRequest
from workers.step import Admission, PromptScores, SamplingParams, StepOutput, StepPlan, TokenLogprobs

VOCAB = 50


def fold(prefix: int, token: int) -> int:
    """Hash of a prefix one token longer."""
    return crc32(token.to_bytes(4, "little"), prefix)


def next_token(prefix: int, params: SamplingParams, seed: int, stop_ids: list[int], num_outputs: int) -> int:
    """The fake model's choice after a prefix. Like a sampler, it masks stop ids until min_tokens outputs exist."""
    token = (prefix if params.temperature == 0 else fold(prefix, seed % 2**32)) % VOCAB
    while num_outputs < params.min_tokens and token in stop_ids:
        token = (token + 1) % VOCAB
    return token


def expected_output(request: AddRequest, max_model_len: int, seed: int = 0) -> tuple[list[int], str]:
    """Tokens and finish reason of a request, by the definition alone."""
    prefix = 0
    for token in request.token_ids:
        prefix = fold(prefix, token)
    output: list[int] = []
    while True:
        token = next_token(prefix, request.params, seed, list(request.stop_ids), len(output))
        prefix = fold(prefix, token)
        output.append(token)
        if token in request.stop_ids and len(output) > request.params.min_tokens:
            return output, "stop"
        if len(output) == request.params.max_tokens or len(request.token_ids) + len(output) == max_model_len:
            return output, "length"


def row_logits(token: int) -> bytes:
    """One fp32 number stands for a row of logits."""
    return array("f", [float(token)]).tobytes()


@dataclass
class SlotState:
    """What a worker's device tables hold for a slot."""

    admission: Admission
    pages: list[int]
    length: int  # positions whose KV is in the pages
    last_token: int | None = None  # sampled, not yet run
    prefix: int = 0  # hash of the tokens in the pages
    drafts: list[int] = field(default_factory=list)  # guesses at what follows last_token


class FakeWorker:
    """Simulates KV pages as cells that remember which prefix they were computed for.

    Sequences of one plan do not see what others of that plan write. AssertionError for a plan no worker could run.
    """

    def __init__(self, num_pages: int, max_num_seqs: int, max_rows: int, max_model_len: int = 1 << 30) -> None:
        self.num_pages, self.max_num_seqs, self.max_rows = num_pages, max_num_seqs, max_rows
        self.max_model_len = max_model_len
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) -> (position, hash of the prefix)
        self.slots: dict[int, SlotState] = {}
        self.next_step = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        assert plan.step == self.next_step
        self.next_step += 1
        self._update_tables(plan)
        rows = len(plan.decode) * (1 + plan.verify) + sum(len(chunk.token_ids) for chunk in plan.chunks)
        assert 0 < rows <= self.max_rows
        ran = plan.decode + [chunk.slot for chunk in plan.chunks]
        assert len(set(ran)) == len(ran)

        written: dict[tuple[int, int], tuple[int, int]] = {}
        tokens, logprobs, scores = [], [], []
        for slot in plan.decode:
            state = self.slots[slot]
            assert state.last_token is not None
            new = self._verify(state, plan.verify, written)
            tokens.append(new)
            logprobs.append(self._logprobs(state, new))
            self._draft(state, plan.draft)
            self._check_room(state, state.length + plan.draft - 1)
        for chunk in plan.chunks:
            state = self.slots[chunk.slot]
            assert state.last_token is None, "a chunk for a sequence that decodes"
            prefix = self._run(state, chunk.start, chunk.token_ids, written)
            scores += self._scores(state, chunk.slot, chunk.start, chunk.token_ids)
            if chunk.sample:
                tokens.append([self._sample(state, prefix)])
                logprobs.append(self._logprobs(state, tokens[-1]))
                self._draft(state, plan.draft)
        self.cells |= written
        return StepOutput(plan.step, tokens, logprobs, scores, 0.25)

    def _update_tables(self, plan: StepPlan) -> None:
        for slot in plan.freed:
            del self.slots[slot]
        for admission in plan.admitted:
            assert 0 <= admission.slot < self.max_num_seqs
            assert admission.slot not in self.slots
            assert admission.num_computed % PAGE_SIZE == 0
            self.slots[admission.slot] = SlotState(admission, list(admission.pages), admission.num_computed)
        for slot, pages in plan.new_pages:
            self.slots[slot].pages += pages
        for state in self.slots.values():
            assert len(set(state.pages)) == len(state.pages)
            assert all(0 <= page < self.num_pages for page in state.pages)

    def _run(self, state: SlotState, start: int, tokens: list[int], written: dict) -> int:
        """Writes the cells of some tokens and returns the hash of the prefix they end."""
        assert start == state.length
        prefix = 0
        for position in range(start):
            at, prefix = self.cells[state.pages[position // PAGE_SIZE], position % PAGE_SIZE]
            assert at == position, "a page was overwritten, or never written"
        for position, token in enumerate(tokens, start):
            prefix = fold(prefix, token)
            cell = state.pages[position // PAGE_SIZE], position % PAGE_SIZE
            assert cell not in written, "two sequences write one cell"
            written[cell] = (position, prefix)
        state.length = start + len(tokens)
        state.prefix = prefix
        return prefix

    def _verify(self, state: SlotState, count: int, written: dict) -> list[int]:
        """Runs the last token and `count` drafts; keeps those that are what would have been sampled."""
        assert state.last_token is not None
        start = state.length
        if start >= self._end(state):  # it ended in the step before: the driver does not know yet
            return [0]
        self._check_room(state, start + 1 + count)
        prefix = self._run(state, start, [state.last_token], written)
        new = [self._sample(state, prefix)]
        accepting = True
        for position, draft in enumerate(state.drafts[:count], start + 1):
            accepting = accepting and draft == new[-1]
            prefix = fold(prefix, draft)
            if position // PAGE_SIZE < len(state.pages):
                cell = state.pages[position // PAGE_SIZE], position % PAGE_SIZE
                assert cell not in written, "two sequences write one cell"
                written[cell] = (position, prefix)
            if accepting:
                state.length += 1
                state.prefix = prefix
                new.append(self._sample(state, prefix))
        return new

    def _draft(self, state: SlotState, count: int) -> None:
        """Guesses what follows the last token; three in four are right."""
        assert state.last_token is not None
        state.drafts = []
        prefix = fold(state.prefix, state.last_token)
        admission = state.admission
        for i in range(count):
            num_outputs = state.length + 1 + i - admission.num_prompt
            token = next_token(prefix, admission.params, admission.seed, admission.stop_ids, num_outputs)
            if fold(prefix, i) % 4 == 0:
                token = (token + 1) % VOCAB
            state.drafts.append(token)
            prefix = fold(prefix, token)

    def _end(self, state: SlotState) -> int:
        """Positions that the request may compute."""
        admission = state.admission
        return min(admission.num_prompt + admission.params.max_tokens, self.max_model_len) - 1

    def _check_room(self, state: SlotState, end: int) -> None:
        """Positions before `end` have pages, unless they come after all that the request may compute."""
        assert len(state.pages) * PAGE_SIZE >= min(end, self._end(state)), "a position without a page"

    def _sample(self, state: SlotState, prefix: int) -> int:
        admission = state.admission
        num_outputs = state.length - admission.num_prompt
        assert num_outputs >= 0
        token = next_token(prefix, admission.params, admission.seed, admission.stop_ids, num_outputs)
        state.last_token = token
        return token

    def _logprobs(self, state: SlotState, tokens: list[int]) -> list[TokenLogprobs]:
        if state.admission.params.logprobs is None:
            return []
        return [TokenLogprobs(-float(token), [], []) for token in tokens]

    def _scores(self, state: SlotState, slot: int, start: int, tokens: list[int]) -> list[PromptScores]:
        rows = tokens[: max(0, state.admission.num_prompt - start)]
        if not state.admission.params.prompt_logits or not rows:
            return []
        return [PromptScores(slot, start, [], b"".join(map(row_logits, rows)))]
