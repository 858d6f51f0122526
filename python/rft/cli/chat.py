"""`rft chat RUN`: talk to what was trained, with the template that it was trained with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rft import log
from rft.cli.arguments import find_run
from rft.errors import ConfigError, RftError

if TYPE_CHECKING:
    from rft.generate.load import Speaker
    from rft.generate.talk import Sampling

_HELP = "/new starts over · /system TEXT sets the system message · /quit or Ctrl-D ends"


def command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory, an adapter or a model folder.", show_default=False)
    ],
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Answer this and exit; - reads it from stdin.", show_default=False),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.", show_default=False)] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Smallest set of tokens with this probability.")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer.")] = 512,
    seed: Annotated[int | None, typer.Option("--seed", help="Repeatable sampling.", show_default=False)] = None,
) -> int:
    """Talk to a trained model. The conversation is rendered as in training; control tokens that you type stay text.

    Answers stream to stdout. With --prompt, or with text piped in, it answers once and exits.
    """
    _check(temperature, top_p, max_tokens, seed)
    for option, text in (("--prompt", prompt), ("--system", system)):
        if text is not None and not is_text(text):
            raise ConfigError(f"rft chat {option}", "is not UTF-8", do="check the terminal's encoding")
    once = _one_shot(prompt)
    with log.capture_noise():
        from rft.generate.load import load_speaker
        from rft.generate.talk import Sampling

        speaker = load_speaker(find_run(run))
    sampling = Sampling(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    messages = [{"role": "system", "content": system}] if system else []
    if once is not None:
        _say_answer(speaker, [*messages, {"role": "user", "content": once}], sampling)
        return 0
    return _talk(speaker, messages, sampling)


MOST_SEED = 2**32 - 1
COLDEST, HOTTEST = 0.01, 100.0
"""Below, dividing by it makes logits infinite; above, every token is as likely as any other."""


def _check(temperature: float, top_p: float, max_tokens: int, seed: int | None) -> None:
    if temperature != 0 and not COLDEST <= temperature <= HOTTEST:  # also for nan
        wanted = f"0 (the likeliest token each time), or {COLDEST} to {HOTTEST:g}"
        raise ConfigError("rft chat --temperature", f"is {temperature}", wanted=wanted)
    if not 0 < top_p <= 1:
        raise ConfigError("rft chat --top-p", f"is {top_p}", wanted="over 0, at most 1")
    if max_tokens < 1:
        raise ConfigError("rft chat --max-tokens", f"is {max_tokens}", wanted="1 or more")
    if seed is not None and not 0 <= seed <= MOST_SEED:
        raise ConfigError("rft chat --seed", f"is {seed}", wanted=f"0 to {MOST_SEED}")


def is_text(text: str) -> bool:
    """Whether it is characters alone: Python smuggles bytes that are none through as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _one_shot(prompt: str | None) -> str | None:
    """The prompt of a call that answers once; None where a person sits at a terminal."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        return None
    try:
        # UTF-8 whatever the locale says, as every file that rft reads
        text = sys.stdin.buffer.read().decode() if hasattr(sys.stdin, "buffer") else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ConfigError(
            "stdin", f"is not UTF-8 (byte {error.start})", wanted="text in UTF-8", do="convert it, as with iconv"
        ) from None
    text = text.rstrip("\r\n")
    if not text:
        raise ConfigError("rft chat", "stdin is empty", wanted="a prompt, by --prompt or piped in")
    return text


def _say_answer(speaker: Speaker, messages: list[dict[str, Any]], sampling: Sampling) -> str:
    """Stream one answer to stdout and return it."""
    from rft.generate.talk import answer

    write = _writer()
    with log.capture_noise():
        turn = answer(speaker, messages, sampling, on_text=write)
        write("\n")
    if not turn.ended and turn.num_tokens >= sampling.max_tokens:
        log.detail("note", f"cut after {turn.num_tokens:,} tokens (--max-tokens)")
    return turn.text


def _writer() -> Callable[[str], None]:
    """Text as it is where a program reads it; on a terminal a model may write no escape sequences."""
    from rft.visible import visible

    shown = visible if log.is_terminal(log.stdout()) else str

    def write(text: str) -> None:
        log.output(shown(text))

    return write


def _talk(speaker: Speaker, messages: list[dict[str, Any]], sampling: Sampling) -> int:
    """Turns until the user ends it. A conversation that the model cannot go on with stays, minus the last message."""
    log.say("model", f"{speaker.name} · {speaker.device.type}\n{_HELP}")
    fresh = messages
    while True:
        try:
            typed = input("\nyou  > ").strip()
        except (EOFError, KeyboardInterrupt):
            log.line()
            return 0
        except UnicodeDecodeError:
            typed = "\udcff"
        if not is_text(typed):
            log.line("that line is not UTF-8: it is left out")
            continue
        if typed in ("/quit", "/exit"):
            return 0
        if typed == "/new":
            messages = list(fresh)
        elif typed.startswith("/system"):
            text = typed.removeprefix("/system").strip()
            messages = fresh = [{"role": "system", "content": text}] if text else []
        elif typed in ("/help", "/?"):
            log.line(_HELP)
        elif typed:
            messages = _turn(speaker, messages, typed, sampling)


def _turn(speaker: Speaker, messages: list[dict[str, Any]], typed: str, sampling: Sampling) -> list[dict[str, Any]]:
    asked = [*messages, {"role": "user", "content": typed}]
    log.output("model> ")
    try:
        text = _say_answer(speaker, asked, sampling)
    except KeyboardInterrupt:  # stop this answer, not the conversation
        log.line("\nstopped; the last message is taken back")
        return messages
    except RftError as error:
        log.error(str(error))
        return messages
    return [*asked, {"role": "assistant", "content": text}] if speaker.encoder.template else messages
