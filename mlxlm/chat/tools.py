"""Functions that a chat runs for the model. Type hints and docstrings describe them; arguments are checked."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from pydantic import ConfigDict, Field, PydanticUserError, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import PydanticUndefined, to_json

from mlxlm.chat.messages import Tool, ToolCall, parse_tools
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line

MAX_RESULT_CHARS = 40_000  # about 10,000 tokens; the rest is left out
_SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(?P<indent>\s*)(?P<name>\w+)(\s*\([^)]*\))?:\s*(?P<text>.*)$")

AllowCall = Callable[[ToolCall], bool]


@dataclass(frozen=True)
class CallableTool(Tool):
    """A tool that can be called: a Python function, or anything else that turns arguments into a result.

    Attributes:
        run: Gets the arguments and returns the result. What it raises becomes the result, as an error.
    """

    run: Callable[[Mapping[str, Any]], Any] = field(kw_only=True)

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> CallableTool:
        """Make a tool from a function with type hints.

        Its name and docstring are those of the function. The section `Args:` of a docstring in Google style describes
        the parameters.

        Raises:
            GenerationError: A parameter has no type hint, or one without a JSON schema; the function takes `*args`,
                `**kwargs` or positional-only parameters, or is a coroutine function.
        """
        name = getattr(function, "__name__", "")
        if not callable(function) or not name.isidentifier():
            raise GenerationError(f"the tool {function!r} is not a function with a name"[:200], "a function (`def`)")
        if inspect.iscoroutinefunction(function):
            raise GenerationError(f"the tool {name} is a coroutine function", "`def` instead of `async def`")
        description, arguments = _parse_docstring(inspect.getdoc(function) or "")
        fields = _fields(function, name, arguments)
        try:
            model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            parameters = model.model_json_schema(schema_generator=_JsonSchema)
        except PydanticUserError as error:
            problem = f"a type hint of the tool {name} has no JSON schema: {error.message.partition('.')[0]}"
            raise GenerationError(problem, "types such as str, int, list[str] or a dataclass") from None
        del parameters["title"]

        def run(arguments: Mapping[str, Any]) -> Any:
            checked = model.model_validate(dict(arguments))
            names = {key: info.alias or key for key, info in model.model_fields.items()}
            return function(**{names[key]: getattr(checked, key) for key in checked.model_fields_set})

        return cls(name, description, parameters, run=run)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Run the tool, and return its result as text: a string as it is, anything else as JSON, an error as such."""
        try:
            result = self.run(arguments)
            text = result if isinstance(result, str) else to_json(result, fallback=str).decode()
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            text = f"error: {'; '.join(problems)}"
        except MlxlmError as error:
            text = one_line(f"error: {error}")
        except (Exception, SystemExit) as error:  # whatever the function raises is for the model
            text = one_line(f"error: {type(error).__name__}: {error}").removesuffix(": ")
        text = text.encode("utf-8", "replace").decode()  # a tokenizer can't encode lone surrogates
        left = len(text) - MAX_RESULT_CHARS
        return text if left <= 0 else f"{text[:MAX_RESULT_CHARS]}\n[{left} more characters were left out]"


def callable_tools(tools: Sequence[Callable[..., Any] | CallableTool]) -> dict[str, CallableTool]:
    """Return tools by their names, made from functions where they are functions.

    Raises:
        GenerationError: As `CallableTool.from_function`.
        TokenizerError: Two tools have the same name, or one has a name that models can't write.
    """
    if not isinstance(tools, Sequence):
        raise GenerationError(f"tools is {tools!r}"[:100], "a list of functions")
    made = [tool if isinstance(tool, CallableTool) else CallableTool.from_function(tool) for tool in tools]
    parse_tools([tool.to_dict() for tool in made])
    return {tool.name: tool for tool in made}


def run_call(tools: Mapping[str, CallableTool], call: ToolCall, allow_call: AllowCall | None = None) -> str:
    """Return the result of a model's call. `allow_call` says whether it may run. An error is a result, too."""
    if (tool := tools.get(call.name)) is None:
        return f"error: there is no function {call.name}; there are {', '.join(tools)}"
    try:
        arguments = call.parsed_arguments()
    except MlxlmError as error:
        return f"error: {error}"
    if allow_call is not None and not allow_call(call):
        return "error: the user did not allow this call"
    return tool.call(arguments)


class _JsonSchema(GenerateJsonSchema):
    """Leaves out the titles, which repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _fields(function: Callable[..., Any], name: str, descriptions: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters of a function as fields of a pydantic model."""
    try:
        signature, hints = inspect.signature(function), get_type_hints(function, include_extras=True)
    except (ValueError, TypeError, NameError) as error:
        problem = f"the type hints of the tool {name} can't be read: {error}"
        raise GenerationError(problem, "types that can be imported where it is defined") from None
    fields: dict[str, Any] = {}
    for number, (parameter, info) in enumerate(signature.parameters.items()):
        if info.kind not in (info.POSITIONAL_OR_KEYWORD, info.KEYWORD_ONLY):
            raise GenerationError(f"the tool {name} has the parameter {info}", "parameters that are passed by name")
        if parameter not in hints:
            raise GenerationError(f"the parameter {parameter} of the tool {name} has no type", f"{parameter}: str")
        default = PydanticUndefined if info.default is info.empty else info.default
        # Fields of a pydantic model can't have every name that a parameter can, aliases can.
        described = Field(default, alias=parameter, description=descriptions.get(parameter))
        fields[f"parameter_{number}"] = hints[parameter], described
    return fields


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description in a docstring in Google style, and the texts of its arguments."""
    parts = _SECTION.split(text)  # the text before the first section, then the name and the text of each
    arguments: dict[str, list[str]] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if not title.startswith("Arg"):
            continue
        lines, current, indent = body.strip("\n").splitlines(), "", None
        for line in lines:
            match = _ARGUMENT.match(line)
            if match and len(match["indent"]) == (len(match["indent"]) if indent is None else indent):
                indent, current = len(match["indent"]), match["name"]
                arguments[current] = [match["text"]]
            elif current and line.startswith(" "):
                arguments[current].append(line.strip())
            else:
                break  # the text after the section
    return parts[0].strip(), {name: " ".join(lines).strip() for name, lines in arguments.items()}
