"""A parsed request -> a Job, or an ApiError: every check is made before anything is sent to the engine."""

import time
import uuid
from http import HTTPStatus

from serve.api.caller import Caller
from serve.api.choice import Choice, Echo, Turn
from serve.api.errors import ApiError, bad_request
from serve.api.job import Job
from serve.api.messages import plain_messages
from serve.api.prompts import Prompt, PromptReader
from serve.api.protocol import ChatRequest, CompletionRequest, GenerationRequest
from serve.api.sampling import sampling_params
from serve.api.structure import GrammarChecker, structured_format, turn_grammar
from serve.api.tools import ToolUse, read_tools
from serve.chat_template import ChatFormat, ChatTemplateError
from serve.parsers.detect import OutputFormat
from serve.parsers.output import Thinking
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
        output_format: OutputFormat,
        model_name: str,
        sampling_defaults: dict[str, float],
        max_model_len: int,
        vocab_size: int,
        *,
        can_end: bool = True,
    ) -> None:
        """`can_end`: whether the model has a token that ends its output."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._model_name = model_name
        self._sampling_defaults = sampling_defaults
        self._vocab_size = vocab_size
        self._output = output_format
        self._can_end = can_end
        self._grammars = GrammarChecker()
        self._prompts = PromptReader(tokenizer, max_model_len, vocab_size)

    def check_model(self, name: str | None) -> None:
        """A request that names no model means the one that is served."""
        if name is not None and name != self._model_name:
            message = f"The model {name!r} does not exist here: this server has {self._model_name!r}."
            raise ApiError(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")

    async def chat(self, request: ChatRequest, caller: Caller = Caller(), kind: str = "chatcmpl-") -> Job:
        """`kind` is what the answer's id begins with."""
        self.check_model(request.model)
        use = read_tools(request)
        if use is not None and self._output.tool_format is None:
            message = "this model's format of tool calls is not known: the server's tool_call_parser can name it"
            raise bad_request(message, "tools", "unsupported_parameter")
        text = self.chat_text(request, use)
        thinking = Thinking.IGNORED if request.continue_final_message else self._output.thinking(text)
        grammar = await self._grammar(request, use, thinking)
        prompt = await self._prompts.from_text(text, "messages", add_special_tokens=request.add_special_tokens)
        asked, name = request.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, name = request.max_tokens, "max_tokens"
        if asked is not None and asked < 1:
            raise bad_request(f"{name} must be at least 1, got {asked}", name)
        budget = self._prompts.output_budget(prompt, asked, None, name)
        logprobs = request.top_logprobs if request.logprobs else None
        params = [self._params(request, choice, budget, logprobs, None, grammar) for choice in range(request.n)]
        keep = self._tokenizer.special_ids_of(self._output.marks(with_tools=use is not None))
        schemas, parallel = (None, True) if use is None else (use.schemas, use.parallel)
        choices = [
            Choice(
                index,
                self._tokenizer,
                one,
                turn=Turn(
                    self._output.parser(thinking, schemas, parallel_calls=parallel), keep, request.include_reasoning
                ),
            )
            for index, one in enumerate(params)
        ]
        return self._job(kind, request, [prompt], params, choices, logprobs, caller)

    async def completion(self, request: CompletionRequest, caller: Caller = Caller()) -> Job:
        self.check_model(request.model)
        grammar = await self._grammar(request, None, Thinking.CLOSED)
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
                params.append(self._params(request, choice, budget, request.logprobs, scored, grammar))
                echo = Echo(prompt, prompt_only) if request.echo else None
                choices.append(Choice(len(choices), self._tokenizer, params[-1], echo))
        return self._job("cmpl-", request, prompts, params, choices, request.logprobs, caller)

    async def _grammar(self, request: GenerationRequest, use: ToolUse | None, thinking: Thinking) -> str:
        """What the output is held to, "" for nothing. Raises ApiError (400)."""
        structure, field = structured_format(request) or (None, "tools")
        grammar = turn_grammar(structure, use, self._output, thinking)
        if not grammar:
            return ""
        if not self._can_end:
            message = f"{field} asks for structured output, but this model's checkpoint names no end token"
            raise bad_request(message, field, "unsupported_parameter")
        if request.ignore_eos:
            raise bad_request(f"ignore_eos cannot be combined with {field}, which ends the output", "ignore_eos")
        await self._grammars.check(grammar, field)
        return grammar

    def chat_text(self, request: ChatRequest, use: ToolUse | None) -> str:
        """What the model is given for the request's messages and tools. Raises ApiError (400)."""
        messages = plain_messages(request.messages)
        if self._chat_template is None:
            message = "This model's checkpoint has no chat template: use /v1/completions with a prompt instead."
            raise bad_request(message, "messages", "no_chat_template")
        prompted = request.add_generation_prompt
        kwargs = request.chat_template_kwargs
        if (effort := request.reasoning_effort) is not None:
            thinks = effort != "none"
            kwargs = {"thinking": thinks, "enable_thinking": thinks, "reasoning_effort": effort} | kwargs
        try:
            return self._chat_template.render(
                messages,
                add_generation_prompt=not request.continue_final_message if prompted is None else prompted,
                continue_final_message=request.continue_final_message,
                tools=None if use is None else use.tools,
                kwargs=kwargs,
            )
        except ChatTemplateError as error:
            raise bad_request(str(error), "messages", "chat_template_error") from None

    def _params(
        self,
        request: GenerationRequest,
        choice: int,
        budget: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        grammar: str,
    ) -> SamplingParams:
        return sampling_params(
            request,
            self._sampling_defaults,
            choice=choice,
            max_tokens=budget,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            vocab_size=self._vocab_size,
            grammar=grammar,
        )

    def _job(
        self,
        kind: str,
        request: GenerationRequest,
        prompts: list[Prompt],
        params: list[SamplingParams],
        choices: list[Choice],
        logprobs: int | None,
        caller: Caller,
    ) -> Job:
        return Job(
            id=f"{kind}{uuid.uuid4().hex}",
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
            caller=caller,
        )
