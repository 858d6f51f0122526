"""Chat templates: which one is used, and whether the Rust renderer gives the same text as jinja2 does.

A template is rendered by minijinja in Rust. Before a set is prepared with it, both engines render a probe set; where
they differ, jinja2 renders every row instead, called from Rust a block of rows at a time.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from rft.errors import ConfigError, DataError
from rft.models.tokenizer import TokenizerFiles

BUILT_IN = ("chatml", "llama3", "gemma", "plain")

Span = tuple[int, int]
"""Start and end of trained text, in characters."""
Renderer = Callable[[list[str]], list["tuple[str, list[Span]] | str"]]

# Bounds of one render by jinja2; minijinja counts its work instead (template.rs).
_MAX_SECONDS = 20.0
_PROBE_SECONDS = 5.0
_MAX_CHARACTERS = 100_000_000

# Noncharacters that wrap generated text while a template renders; no Unicode text holds them.
_OPEN, _CLOSE = "\ufdd1", "\ufdd2"
_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template and where it came from."""

    source: str
    name: str
    """For messages: "the tokenizer's own", "built-in chatml" or a file."""

    @property
    def tagged(self) -> bool:
        """Whether it marks the assistant's text by generation tags."""
        return _TAG.search(self.source) is not None


def load_template(setting: str, tokenizer: TokenizerFiles) -> ChatTemplate | None:
    """The template that `data.template` asks for; None where it is "model" and the model has none.

    A built-in that writes no begin-of-text token gets one in front if this tokenizer puts one before text, so that
    training and chat agree with what the base model was trained on.
    Raises ConfigError for an unknown name or missing file, DataError for a template that is not valid jinja.
    """
    if setting == "model":
        template = ChatTemplate(tokenizer.template, "the tokenizer's own") if tokenizer.template else None
    elif setting in BUILT_IN:
        source = (resources.files("rft.data") / "templates" / f"{setting}.jinja").read_text("utf-8")
        if tokenizer.add_bos and "bos_token" not in source:
            source = "{{- bos_token -}}\n" + source
        template = ChatTemplate(source, f"built-in {setting}")
    else:
        template = _from_file(setting)
    if template is not None:
        _compile(template.source, template.name)
    return template


def render(
    template: ChatTemplate | str,
    conversation: dict[str, Any],
    special: dict[str, str],
    add_generation_prompt: bool = False,
) -> tuple[str, list[Span]]:
    """Text and generation spans (characters) of a conversation {messages, tools?, ...}, by jinja2 as transformers does it.

    Raises DataError with the template's own message where it refuses.
    """
    source, name = (template, "template") if isinstance(template, str) else (template.source, template.name)
    try:
        marked = _joined(_compile(source, name).generate(**_arguments(conversation, special, add_generation_prompt)))
    except Exception as error:  # templates raise anything: TypeError, UndefinedError, their own raise_exception
        raise DataError(f"template ({name})", str(error) or type(error).__name__) from None
    return _unmark(marked)


def callback(template: ChatTemplate, special: dict[str, str]) -> Renderer:
    """`render` for blocks of rows given as JSON: a string in place of a result is the row's error."""

    def one(text: str) -> tuple[str, list[Span]] | str:
        conversation = json.loads(text)
        prompt = conversation.pop("add_generation_prompt", False)
        try:
            return render(template, conversation, special, prompt)
        except DataError as error:
            return error.problem

    def block(conversations: list[str]) -> list[tuple[str, list[Span]] | str]:
        with Watch(_MAX_SECONDS) as watch:
            return [watch.call(one, text) for text in conversations]

    return block


class _TooLong(BaseException):
    """Raised inside a render by the watch; no Exception, so that no template's own handling of errors sees it."""


class Watch:
    """Stops renders that take longer than `seconds`: jinja2 has no limit of its own."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._thread = threading.get_ident()
        self._lock = threading.Lock()
        self._since: float | None = None
        self._fired = False
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="rft-template-watch", daemon=True)

    def __enter__(self) -> Watch:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()

    def call(self, render: Callable[[str], tuple[str, list[Span]] | str], text: str) -> tuple[str, list[Span]] | str:
        """What `render` gives for `text`, or the sentence that it took too long."""
        try:
            with self._lock:
                self._fired, self._since = False, time.monotonic()
            result = render(text)
            with self._lock:
                self._since = None
            while self._fired:  # on its way: it must not arrive in the next render
                time.sleep(0.01)
            return result
        except _TooLong:
            return f"it does too much work: over {self.seconds:g} s for one chat"

    def _watch(self) -> None:
        import ctypes

        while not self._done.wait(min(self.seconds / 4, 1.0)):
            with self._lock:
                if self._since is not None and time.monotonic() - self._since > self.seconds:
                    self._since, self._fired = None, True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_TooLong))


def native_difference(template: ChatTemplate, special: dict[str, str]) -> str | None:
    """How minijinja's rendering of the probe set differs from jinja2's, in a few words; None if nowhere."""
    from rft import _native

    try:
        native = _native.Template(template.source, special)
    except _native.NativeError as error:
        return f"it cannot compile the template ({_first_line(error)})"
    with Watch(_PROBE_SECONDS) as watch:
        for name, conversation in PROBES.items():
            for prompt in (False, True):
                # minijinja first: its limits are the tighter ones.
                failed, got = "", None
                try:
                    text, spans = native.render(json.dumps(_as_rows_are(conversation), ensure_ascii=False), prompt)
                    got = (text, [(start, end) for start, end in spans])
                except _native.NativeError as error:
                    failed = _first_line(error)
                if "ran out of fuel" in failed:
                    raise DataError(template.name, f"the template does too much work for the probe {name!r}")
                made = watch.call(lambda _: _probe(template, conversation, special, prompt), "")  # noqa: B023 - called here
                if isinstance(made, str) and "too much work" in made:
                    raise DataError(template.name, f"the template fails on the probe {name!r}: {made}")
                wanted = None if isinstance(made, str) else made
                if failed and wanted is not None:
                    return f"it fails on the probe {name!r} ({failed})"
                if got != wanted and not failed:
                    return f"the probe {name!r} comes out differently"
    return None


def _probe(
    template: ChatTemplate, conversation: dict[str, Any], special: dict[str, str], prompt: bool
) -> tuple[str, list[Span]] | str:
    try:
        return render(template, conversation, special, prompt)
    except DataError as error:
        return error.problem


def spelled_control_tokens(template: ChatTemplate, tokenizer: TokenizerFiles) -> list[str]:
    """Control tokens in the template's text that this tokenizer has no single token for (they cost several each)."""
    spelled = dict.fromkeys(re.findall(r"<\|[A-Za-z0-9_]+\|>|<(?:start|end)_of_turn>", template.source))
    return [text for text in spelled if tokenizer.token_id(text) is None]


def _joined(pieces: Iterable[str]) -> str:
    """The whole text. Raises ValueError where it grows without bounds."""
    text, length = [], 0
    for piece in pieces:
        text.append(piece)
        length += len(piece)
        if length > _MAX_CHARACTERS:
            raise ValueError(f"it does too much work: over {_MAX_CHARACTERS:,} characters for one chat")
    return "".join(text)


def _from_file(setting: str) -> ChatTemplate:
    path = Path(setting)
    if not path.is_file():
        raise ConfigError(
            "data.template",
            f"{setting!r} is neither a file nor a built-in template",
            wanted=f'"model", a .jinja file, or one of {", ".join(BUILT_IN)}',
        )
    try:
        return ChatTemplate(path.read_text("utf-8"), path.name)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(str(path), f"cannot be read: {error}") from None


@lru_cache(maxsize=16)
def _compile(source: str, name: str) -> Any:
    """The jinja2 template, sandboxed, with what transformers gives templates."""
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}...{% endgeneration %}: its text between two noncharacters."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it an instance variable)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

        def _wrap(self, caller: Callable[[], str]) -> str:
            return _OPEN + caller() + _CLOSE

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=refuse, strftime_now=_now)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise DataError(f"{name}:{error.lineno}", f"not a jinja template: {error.message}") from None
    except (ValueError, ArithmeticError, RecursionError) as error:  # of constants, which jinja2 computes here
        raise DataError(name, f"the template cannot be compiled: {error}") from None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Python's own JSON: jinja2's filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(layout: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(layout)


def _as_rows_are(conversation: dict[str, Any]) -> dict[str, Any]:
    """As the extension hands rows to the template: messages without null fields, reasoning under all of its names."""
    return {**conversation, "messages": [_with_reasoning(message) for message in conversation["messages"]]}


def _arguments(conversation: dict[str, Any], special: dict[str, str], add_generation_prompt: bool) -> dict[str, Any]:
    arguments = {"tools": None, "documents": None, **special, **_as_rows_are(conversation)}
    return {**arguments, "add_generation_prompt": add_generation_prompt}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Without null fields but the content (null beside tool calls), and with a message's reasoning under each of the names that templates read (as transformers 5)."""
    message = {key: value for key, value in message.items() if value is not None or key == "content"}
    reasoning = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _unmark(marked: str) -> tuple[str, list[Span]]:
    pieces: list[str] = []
    spans: list[Span] = []
    length, start = 0, 0
    for piece in re.split(f"([{_OPEN}{_CLOSE}])", marked):
        if piece == _OPEN:
            start = length
        elif piece == _CLOSE:
            spans.append((start, length))
        else:
            pieces.append(piece)
            length += len(piece)
    return "".join(pieces), spans


def _first_line(error: BaseException) -> str:
    lines = (getattr(error, "problem", "") or str(error)).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


_TOOL = {
    "type": "function",
    "function": {
        "name": "find_train",
        "description": "Trains <from> a & 'to' b – with \"changes\"",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Zürich", "Ulm"]}, "changes": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "type": "function",
    "id": "call00001",
    "function": {
        "name": "find_train",
        "arguments": {
            "city": "Zürich",
            "changes": 2,
            "share": 0.5,
            "large": 1e20,
            "direct": True,
            "via": None,
            "x": [1, {}],
        },
    },
}

PROBES: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [_user("Hi"), _assistant("Hello!")]},
    "system": {"messages": [{"role": "system", "content": "Be brief. "}, _user(" Hi \n"), _assistant("\n Hello! ")]},
    "several turns": {
        "messages": [_user("a"), _assistant("b"), _user("c\n\nd"), _assistant("e"), _user("f"), _assistant("g")]
    },
    "open end": {"messages": [_user("a"), _assistant("b"), _user("c")]},
    "two turns by one speaker": {"messages": [_user("a"), _user("b"), _assistant("c"), _assistant("d")]},
    "reasoning": {"messages": [_user("2+2?"), _assistant("4", reasoning_content="two and two")]},
    "reasoning in the text": {
        "messages": [
            _user("1+1"),
            _assistant("<think>\nadd\n</think>\n\n2"),
            _user("3+3"),
            _assistant("<think>x</think>6"),
        ]
    },
    "tools": {
        "messages": [
            _user("A train?"),
            _assistant("", tool_calls=[_CALL]),
            {"role": "tool", "name": "find_train", "tool_call_id": "call00001", "content": '{"at": "9:07"}'},
            _assistant("At 9:07 – platform 3"),
        ],
        "tools": [_TOOL],
    },
    "parts": {"messages": [_user([{"type": "text", "text": "look"}]), _assistant([{"type": "text", "text": "seen"}])]},
    "odd text": {
        "messages": [
            _user("{{ 7*7 }} {% if %} <|im_end|> \u200b\U0001f600 \r\n\t"),
            _assistant("`x = {'a': \"b\"}` None"),
        ]
    },
    "empty": {"messages": [_user(""), _assistant("")]},
}
"""Conversations on which both engines must agree, refusals included."""
