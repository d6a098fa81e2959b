"""A parsed request -> a Job, or an ApiError: every check is made before anything is sent to the engine."""

import time
import uuid
from http import HTTPStatus

from serve.api.choice import Choice, Echo
from serve.api.errors import ApiError, bad_request
from serve.api.job import Job
from serve.api.messages import plain_messages
from serve.api.prompts import Prompt, PromptReader
from serve.api.protocol import ChatRequest, CompletionRequest, GenerationRequest
from serve.api.sampling import sampling_params
from serve.chat_template import ChatFormat, ChatTemplateError
from serve.tokenizer import Tokenizer
from workers.step import SamplingParams

_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_MAX_SEQUENCES = 4096  # of one request: prompts times n


class Intake:
    """`sampling_defaults` are the checkpoint's (see `checkpoint_defaults`); no `chat_template` means no chat."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatFormat | None,
        model_name: str,
        sampling_defaults: dict[str, float],
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._model_name = model_name
        self._sampling_defaults = sampling_defaults
        self._vocab_size = vocab_size
        self._prompts = PromptReader(tokenizer, max_model_len, vocab_size)

    def check_model(self, name: str | None) -> None:
        """A request that names no model means the one that is served."""
        if name is not None and name != self._model_name:
            message = f"The model {name!r} does not exist here: this server has {self._model_name!r}."
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    async def chat(self, request: ChatRequest) -> Job:
        self.check_model(request.model)
        text = self.chat_text(request)
        prompt = await self._prompts.from_text(text, "messages", add_special_tokens=request.add_special_tokens)
        asked, name = request.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, name = request.max_tokens, "max_tokens"
        if asked is not None and asked < 1:
            raise bad_request(f"{name} must be at least 1, got {asked}", name)
        budget = self._prompts.output_budget(prompt, asked, None, name)
        logprobs = request.top_logprobs if request.logprobs else None
        params = [self._params(request, choice, budget, logprobs, None) for choice in range(request.n)]
        choices = [Choice(index, self._tokenizer, one) for index, one in enumerate(params)]
        return self._job("chatcmpl", request, [prompt], params, choices, logprobs)

    async def completion(self, request: CompletionRequest) -> Job:
        self.check_model(request.model)
        prompts = await self._prompts.read_all(request.prompt, add_special_tokens=request.add_special_tokens)
        if len(prompts) * request.n > _MAX_SEQUENCES:
            raise bad_request(f"prompts times n must not exceed {_MAX_SEQUENCES}", "n")
        prompt_only = request.echo and request.max_tokens == 0  # scoring: a token is made and dropped
        asked = 1 if prompt_only else request.max_tokens
        params: list[SamplingParams] = []
        choices: list[Choice] = []
        for prompt in prompts:
            budget = self._prompts.output_budget(prompt, asked, _COMPLETION_TOKENS, "max_tokens")
            for choice in range(request.n):
                scored = request.logprobs if request.echo else None
                params.append(self._params(request, choice, budget, request.logprobs, scored))
                echo = Echo(prompt, prompt_only) if request.echo else None
                choices.append(Choice(len(choices), self._tokenizer, params[-1], echo))
        return self._job("cmpl", request, prompts, params, choices, request.logprobs)

    def chat_text(self, request: ChatRequest) -> str:
        """What the model is given for the request's messages. Raises ApiError (400)."""
        messages = plain_messages(request.messages)
        if self._chat_template is None:
            message = "This model's checkpoint has no chat template: use /v1/completions with a prompt instead."
            raise bad_request(message, "messages", "no_chat_template")
        prompted = request.add_generation_prompt
        try:
            return self._chat_template.render(
                messages,
                add_generation_prompt=not request.continue_final_message if prompted is None else prompted,
                continue_final_message=request.continue_final_message,
                kwargs=request.chat_template_kwargs,
            )
        except ChatTemplateError as error:
            raise bad_request(str(error), "messages", "chat_template_error") from None

    def _params(
        self, request: GenerationRequest, choice: int, budget: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        return sampling_params(
            request,
            self._sampling_defaults,
            choice=choice,
            max_tokens=budget,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            vocab_size=self._vocab_size,
        )

    def _job(
        self,
        kind: str,
        request: GenerationRequest,
        prompts: list[Prompt],
        params: list[SamplingParams],
        choices: list[Choice],
        logprobs: int | None,
    ) -> Job:
        return Job(
            id=f"{kind}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._model_name,
            prompts=prompts,
            n=request.n,
            params=params,
            choices=choices,
            priority=request.priority,
            cache_salt=request.cache_salt,
            top_logprobs=logprobs,
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
        )
