"""Chat templates: dialogues rendered as text by a Jinja template, as Hugging Face tokenizers have them."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from muster.data.invalid_rows import InvalidRow
from muster.spec.errors import ConfigError, MusterError

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template for tokenizers without one: ChatML, as in OpenAI's and Qwen's models."""
BEGIN_OF_MESSAGE = "<|im_start|>"
ASSISTANT = "assistant"


@dataclass(frozen=True)
class ChatTemplate:
    """Jinja template of a dialogue.

    It sees `messages`, `add_generation_prompt`, the special tokens by name, and `tools` where a dialogue has some.
    """

    text: str = CHATML
    special_tokens: tuple[tuple[str, str], ...] = ()

    def segments(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[tuple[str, bool]]:
        """Return the dialogue's text as segments, with True for the assistant's answers.

        An answer is the difference of two renderings: the messages up to and including it, minus the messages before
        it with the generation prompt. Raises InvalidRow if the template refuses the dialogue, or changes the text of
        earlier messages, so that there is no such difference.
        """
        if self.text == CHATML and (tools or any("tool_calls" in message for message in messages)):
            raise InvalidRow("template", "ChatML has no form for tools: name a template with data.chat_template")
        segments: list[tuple[str, bool]] = []
        done = ""
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self._render(messages[:index], True, tools)
            answered = self._render(messages[: index + 1], False, tools)
            if not prompt.startswith(done) or not answered.startswith(prompt):
                raise InvalidRow("template", f"the chat template changes the text before message {index + 1}")
            segments += [(prompt[len(done) :], False), (answered[len(prompt) :], True)]
            done = answered
        if not segments:
            raise InvalidRow("empty", f"no message has the role {ASSISTANT}, so no part contributes to the loss")
        return segments

    def prompt(self, messages: list[dict[str, Any]]) -> str:
        """Return the text after which the assistant answers. Raises InvalidRow if the template refuses the dialogue."""
        return self._render(messages, True)

    def _render(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool, tools: list[Any] | None = None
    ) -> str:
        from jinja2 import TemplateError

        values: dict[str, Any] = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(values, **dict(self.special_tokens))
        except (TemplateError, TypeError, KeyError) as error:
            raise InvalidRow("template", f"the chat template refuses it: {error}") from None

    @cached_property
    def _template(self) -> Any:
        try:
            from jinja2 import TemplateSyntaxError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise MusterError("dialogues need Jinja, which is not installed: pip install 'muster-llm[data]'") from None
        # The settings of transformers, since others give other whitespace; but without its function for today's date,
        # with which the same rows would give other tokens tomorrow.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, **more: json.dumps(value, ensure_ascii=False, **more)
        environment.globals["raise_exception"] = _raise_template_error
        try:
            return environment.from_string(self.text)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template can't be read: {error.message} (its line {error.lineno})") from None

    def __getstate__(self) -> dict[str, Any]:
        return {"text": self.text, "special_tokens": self.special_tokens}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def read_template(path: Path, special_tokens: tuple[tuple[str, str], ...] = ()) -> ChatTemplate:
    """Read a template from a file. Raises ConfigError if it can't be read."""
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), special_tokens)
    except OSError as error:
        raise ConfigError(f"data.chat_template: {path} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.chat_template: {path} can't be read as UTF-8 text ({error})") from error


def _raise_template_error(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
