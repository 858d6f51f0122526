"""A conversation as token ids for generation, by the rules of training: control tokens that somebody typed stay text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rft.data.template import ChatTemplate, render
from rft.errors import DataError
from rft.models.tokenizer import TokenizerFiles

GUARD = "\ufdd0"
"""A noncharacter put into control tokens that stand in a message, so that they are none in the rendered text."""


class PromptEncoder:
    """Renders conversations and encodes them as the data path does."""

    def __init__(self, template: ChatTemplate | None, tokenizer: TokenizerFiles):
        from rft import _native

        self.template = template
        self.tokenizer = tokenizer
        self._native = _native.Tokenizer(tokenizer.json, tokenizer.unicode)
        control = sorted(tokenizer.control_tokens(), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, control))) if control else None

    def prompt(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of the conversation up to where the assistant speaks.

        Without a template (a base model) there is one message, and its text is the prompt.
        """
        if self.template is None:
            if len(messages) != 1:
                raise DataError(
                    "template", "this model has no chat template, so it only continues text", do="give one --prompt"
                )
            ids = self._text(str(messages[0]["content"]))
            bos = self.tokenizer.bos_id
            return [bos, *ids] if self.tokenizer.add_bos and bos is not None else ids
        guarded = [{**m, "content": self._guard(m["content"])} for m in messages]
        text, _ = render(self.template, {"messages": guarded}, self.tokenizer.special, add_generation_prompt=True)
        return self.encode_rendered(text)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered text: the template's control tokens are tokens, guarded ones are text."""
        ids: list[int] = []
        position = 0
        for match in self._control.finditer(text) if self._control else ():
            ids += self._text(text[position : match.start()])
            token = self.tokenizer.token_id(match.group())
            assert token is not None, "control_tokens() come from the vocabulary"
            ids.append(token)
            position = match.end()
        return ids + self._text(text[position:])

    def turn_ends(self) -> set[int]:
        """Ids after which the assistant's turn is over: the end token, and the control token that the template puts behind it."""
        ends = {self.tokenizer.eos_id}
        if self.template is not None and self._control is not None:
            said = "yes."
            turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
            text, _ = render(self.template, {"messages": turns}, self.tokenizer.special)
            match = self._control.match(text[text.rindex(said) + len(said) :].lstrip()) if said in text else None
            token = self.tokenizer.token_id(match.group()) if match else None
            if token is not None:
                ends.add(token)
        return ends

    def _guard(self, text: str) -> str:
        if GUARD in text:
            raise DataError("message", "holds the character U+FDD0, which no text has", do="remove it")
        if self._control is None:
            return text
        return self._control.sub(lambda match: match.group()[0] + GUARD + match.group()[1:], text)

    def _text(self, text: str) -> list[int]:
        text = text.replace(GUARD, "")
        return [int(i) for i in self._native.encode_text(text)] if text else []
