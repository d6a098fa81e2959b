"""Which tags a checkpoint's model writes, read from its chat format."""

from dataclasses import dataclass
from pathlib import Path

from serve.chat_template import ChatFormat, ChatTemplate, DeepSeekChat
from serve.parsers.output import END_THINK, THINK, OutputParser, Thinking
from serve.parsers.tool_formats import TOOL_FORMATS, Schemas, ToolFormat
from serve.tokenizer import read_optional_json

AUTO, NONE = "auto", "none"

# What only one format's templates say, the more special first.
_SIGNS = (
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<arg_key>", "glm"),
)
# For templates that tell nothing of tools, by the configuration's model_type.
_FAMILIES = {
    "deepseek_v2": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "kimi_k2": "kimi_k2",
    "glm4_moe_lite": "glm",
    "glm_moe_dsa": "glm",
}


@dataclass(frozen=True)
class OutputFormat:
    """How a model's turns are read."""

    tools: str | None = None  # a name of TOOL_FORMATS
    reasoning: bool = True  # whether a turn may begin with a reasoning
    thinker: bool = False  # whether the model is known to write one

    @property
    def tool_format(self) -> ToolFormat | None:
        return None if self.tools is None else TOOL_FORMATS[self.tools]

    def marks(self, *, with_tools: bool) -> frozenset[str]:
        """Tags that must reach the parser, special tokens or not."""
        tools = self.tool_format.marks if with_tools and self.tool_format is not None else ()
        return frozenset((THINK, END_THINK) if self.reasoning else ()) | frozenset(tools)

    def thinking(self, prompt: str) -> Thinking:
        return Thinking.of_prompt(prompt) if self.reasoning else Thinking.IGNORED

    def parser(self, thinking: Thinking, tools: Schemas | None, *, parallel_calls: bool = True) -> OutputParser:
        """For one turn; `tools` None: nothing is a call."""
        exact = self.tools in ("deepseek_v32", "deepseek_v4")  # their encodings put nothing around a reasoning
        tool_format = None if tools is None else self.tool_format
        return OutputParser(thinking, tool_format, tools, parallel_calls=parallel_calls, exact=exact)


def detect_output_format(
    folder: Path, chat: ChatFormat | None, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
) -> OutputFormat:
    """The checkpoint's format; names other than `auto` are taken as they are."""
    tools = tool_call_parser
    if tools == AUTO:
        tools = _detect_tools(folder, chat)
    thinker = isinstance(chat, DeepSeekChat) or (isinstance(chat, ChatTemplate) and END_THINK in chat.source)
    return OutputFormat(
        None if tools == NONE else tools,
        reasoning_parser != NONE,
        reasoning_parser != NONE and (thinker or reasoning_parser != AUTO),
    )


def _detect_tools(folder: Path, chat: ChatFormat | None) -> str:
    if isinstance(chat, DeepSeekChat):
        return chat.kind
    source = chat.source if isinstance(chat, ChatTemplate) else ""
    if "<｜tool▁calls▁begin｜>" in source:
        return "deepseek_v3" if "```json" in source else "deepseek_v31"
    if "｜DSML｜" in source:
        return "deepseek_v32" if "function_calls" in source else "deepseek_v4"
    for sign, name in _SIGNS:
        if sign in source:
            return name
    return _FAMILIES.get(read_optional_json(folder / "config.json").get("model_type", ""), NONE)
