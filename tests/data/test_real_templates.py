"""Acceptance on the chat templates of real models: text, spans and masks are those of transformers.

RFT_TOKENIZERS names the folder that real_tokenizers.sh made: it holds chat_templates/*.jinja beside the tokenizers.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rft import _native
from rft.data.template import ChatTemplate, native_difference, render
from rft.errors import DataError

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("RFT_TOKENIZERS") or "nowhere") / "chat_templates"


class Kept(dict[tuple[str, str], Any]):
    """Figures of a bench by case and metric."""

    def add(self, case: str, system: str, metric: str, value: Any) -> None:
        self[case, metric] = value


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_templates", ROOT / "bench" / "data" / "templates.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_the_engine_that_takes_it(made: ModuleType, path: Path) -> list[str]:
    """Where a template, rendered as a preparation does it, differs from transformers."""
    template = ChatTemplate(path.read_text("utf-8"), path.name)
    native = None
    if native_difference(template, made.SPECIAL) is None:
        native = _native.Template(template.source, made.SPECIAL)
    wrong = []
    for name, conversation in made.PROBES.items():
        for prompt in (False, True):
            if native is not None:
                verdict = made.compare(native, template.source, conversation, prompt)
            else:
                try:
                    given = render(template, conversation, made.SPECIAL, prompt)
                except DataError:
                    given = None
                wanted = made.by_transformers(template.source, conversation, prompt)
                verdict = "same" if given == wanted else "differs"
            if verdict not in ("same", "both refuse"):
                wrong.append(f"{path.name}, {name!r}, prompt {prompt}: {verdict}")
    return wrong


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason="RFT_TOKENIZERS names no folder with chat_templates/*.jinja")
def test_chat_templates_of_real_models_give_text_spans_and_masks_as_transformers_does(tmp_path: Path) -> None:
    templates, found, made = sorted(FOLDER.glob("*.jinja")), Kept(), bench()
    assert templates
    assert [fault for path in templates for fault in by_the_engine_that_takes_it(made, path)] == []
    made.masks(templates, tmp_path, found)
    assert found["templates/masks", "wrong"] == 0
    assert found["templates/masks", "template_refused"] == 0
    assert found["templates/masks", "right"] > 3 * len(templates)
    chats = made.made_up(tmp_path / "chats.jsonl", rows=made.COMPARED_ROWS)
    made.filled_in(templates, chats, tmp_path, found, made.tokenizer(None))
    assert found["templates/filled-in", "templates_that_differ"] == 0
