"""Generating a turn: tokens one by one, text as soon as it is whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rft.errors import DataError
from rft.generate.load import Speaker
from rft.models.finite import useless_numbers


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 = the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 512
    seed: int | None = None


@dataclass(frozen=True)
class Turn:
    """What was generated. ended: the model ended its turn itself."""

    text: str
    num_tokens: int
    ended: bool


def answer(
    speaker: Speaker,
    messages: Sequence[dict[str, Any]],
    sampling: Sampling | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Turn:
    """The assistant's next turn. on_text gets each new piece of text as soon as it is there.

    Raises DataError where the conversation fills the model's context, ModelError where the model gives no numbers.
    """
    sampling = sampling or Sampling()
    prompt = speaker.encoder.prompt(messages)
    room = (speaker.max_positions or len(prompt) + sampling.max_tokens) - len(prompt)
    if room < 1:
        raise DataError(
            "conversation",
            f"it has {len(prompt):,} tokens, and the model has positions for {speaker.max_positions:,}",
            do="shorten it, or start over with /new",
        )
    ends = speaker.encoder.turn_ends() | _listed_ends(speaker.model)
    stream = TextStream(speaker.tokenizer, ends, on_text)
    if sampling.seed is not None:
        torch.manual_seed(sampling.seed)
    options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    from transformers import LogitsProcessorList

    def refuse_useless_logits(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """From logits that are no numbers a token would be chosen all the same, and the text would look like bad training."""
        if bool(torch.isnan(logits).any()) or not bool(torch.isfinite(logits).any()):
            raise useless_numbers(speaker.source, "the model's logits are not finite")
        return logits

    with torch.inference_mode():
        speaker.model.generate(
            input_ids=torch.tensor([prompt], device=speaker.device),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=speaker.device),
            max_new_tokens=min(room, sampling.max_tokens),
            eos_token_id=sorted(ends),
            pad_token_id=speaker.tokenizer.pad_id,
            use_cache=True,
            streamer=stream,
            logits_processor=LogitsProcessorList([refuse_useless_logits]),
            **_without_defaults(speaker.model, options),
        )
    stream.end()
    return Turn(stream.text.strip(), len(stream.ids), stream.ended)


def _listed_ends(model: Any) -> set[int]:
    """The end tokens that the model's generation config lists (Llama 3 has three)."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    return set(listed) if isinstance(listed, list | tuple) else ({listed} if listed is not None else set())


def _without_defaults(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Sampling settings of the checkpoint must not act where greedy decoding was asked for."""
    if not options["do_sample"]:
        options |= {"temperature": None, "top_p": None, "top_k": None}
    return options


class TextStream:
    """Takes ids as `generate` makes them (its streamer protocol) and gives out text that no later id can change."""

    def __init__(self, tokenizer: Any, ends: set[int], on_text: Callable[[str], None] | None = None):
        self._backend = tokenizer.hf()
        self._ends = ends
        self._on_text = on_text
        self._prompt_seen = False
        self._shown = 0
        self.ids: list[int] = []
        self.text = ""
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then each new id."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        for token in value.reshape(-1).tolist():
            if token in self._ends:
                self.ended = True
            elif not self.ended:
                self.ids.append(token)
        self.text = self._backend.decode(self.ids, skip_special_tokens=True)
        # a character of several tokens decodes to U+FFFD until its last one is there
        self._show(len(self.text) - 1 if self.text.endswith("\ufffd") else len(self.text))

    def end(self) -> None:
        """No more ids: whatever is left is text."""
        self._show(len(self.text))

    def _show(self, stop: int) -> None:
        if stop > self._shown and self._on_text:
            self._on_text(self.text[self._shown : stop])
        self._shown = max(self._shown, stop)
