"""Chat templates: the same text and spans as transformers, in both engines, and refusals that say what to do."""

from __future__ import annotations

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rft.data.template import (
    BUILT_IN,
    PROBES,
    ChatTemplate,
    callback,
    load_template,
    native_difference,
    render,
    spelled_control_tokens,
)
from rft.errors import ConfigError, DataError
from support.data import BOS, CHATML, CHATML_TAGGED, tiny_files

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
REASONING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content is defined %}{{ m.reasoning_content }}|{{ m.thinking }}{% endif %}"
    "{{ m.content if m.content is string else m.content | tojson }}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson(indent=1) }}"
    "{% endif %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{{ bos_token }}{% break %}"
)
LOOPS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{% set ns = namespace(x=loop.index0) %}"
    "{{ ns.x }}{{ m.content[::-1] if m.content is string }}{{ m.content.split('\n')[0].strip() if m.content is string }}{% endfor %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tiny_files(tmp_path_factory.mktemp("tokenizer"), bos=True)


def by_transformers(source, conversation, special, prompt):
    text, spans = render_jinja_template(
        [conversation["messages"]],
        tools=conversation.get("tools"),
        chat_template=source,
        return_assistant_tokens_mask=True,
        add_generation_prompt=prompt,
        **special,
    )
    return text[0], [tuple(span) for span in spans[0]]


def source_of(name, files):
    extra = {"chatml as shipped": CHATML, "chatml tagged": CHATML_TAGGED, "reasoning": REASONING[:-11], "loops": LOOPS}
    return extra[name] if name in extra else load_template(name, files).source


@pytest.mark.parametrize("name", [*BUILT_IN, "chatml as shipped", "chatml tagged", "reasoning", "loops"])
def test_text_and_spans_are_those_of_transformers(files, name):
    source = source_of(name, files)
    refused = 0
    for conversation in PROBES.values():
        for prompt in (False, True):
            try:
                wanted = by_transformers(source, conversation, files.special, prompt)
            except Exception:
                refused += 1
                with pytest.raises(DataError):
                    render(source, conversation, files.special, prompt)
                continue
            assert render(source, conversation, files.special, prompt) == wanted
    assert refused < len(PROBES)  # most must have been compared


@pytest.mark.parametrize("name", [*BUILT_IN, "chatml as shipped", "chatml tagged", "reasoning", "loops"])
def test_minijinja_agrees_so_that_rust_renders(files, name):
    assert native_difference(ChatTemplate(source_of(name, files), name), files.special) is None


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    ],
    ids=["writes for ever", "doubles"],
)
def test_template_that_works_without_end_is_refused_and_not_handed_to_jinja2(files, source):
    with pytest.raises(DataError, match="too much work"):
        native_difference(ChatTemplate(source, "endless"), files.special)


def test_template_whose_constants_cannot_be_computed_is_refused(files):
    with pytest.raises(DataError, match="cannot be compiled"):
        render(ChatTemplate("{{ 2**99999999 }}", "power"), PROBES["one turn"], {})


def test_template_that_minijinja_cannot_render_is_found_out(files):
    template = ChatTemplate("{{ messages[0].role.translate({117: 'U'}) }}", "a str method that minijinja lacks")
    assert render(template, PROBES["one turn"], {})[0] == "User"
    assert native_difference(template, files.special) is not None


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_marks_each_answer_with_the_token_that_ends_it(files, name):
    template = load_template(name, files)
    text, spans = render(template, PROBES["several turns"], files.special)
    end = {
        "chatml": "<|im_end|>",
        "llama3": "<|eot_id|>",
        "gemma": "<end_of_turn>",
        "plain": files.special["eos_token"],
    }
    assert [text[a:b] for a, b in spans] == [answer + end[name] for answer in ("b", "e", "g")]
    assert template.tagged


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_prompt_is_a_prefix_of_the_answered_chat(files, name):
    template = load_template(name, files)
    messages = PROBES["several turns"]["messages"]
    prompt, _ = render(template, {"messages": messages[:-1]}, files.special, True)
    whole, spans = render(template, {"messages": messages}, files.special)
    assert whole.startswith(prompt)
    assert spans[-1][0] == len(prompt)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_begins_with_bos_exactly_where_the_tokenizer_adds_one(tmp_path, name):
    for bos in (True, False):
        files = tiny_files(tmp_path / str(bos), bos=bos)
        text, _ = render(load_template(name, files), PROBES["one turn"], files.special)
        assert text.startswith(BOS) == bos
        assert text.count(BOS) == int(bos)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_refuses_what_it_would_leave_out(files, name):
    with pytest.raises(DataError, match="tool calls"):
        render(load_template(name, files), PROBES["tools"], files.special)
    image = {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}
    with pytest.raises(DataError, match="part of type image"):
        render(load_template(name, files), image, files.special)


def test_the_models_own_template_is_the_default_and_may_be_missing(files, tmp_path):
    assert load_template("model", files).source == CHATML
    assert load_template("model", tiny_files(tmp_path, template=None)) is None


def test_template_file_is_read(files, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("{{ messages[0].content }}é")
    template = load_template(str(path), files)
    assert (template.name, render(template, PROBES["one turn"], {})[0]) == ("mine.jinja", "Hié")


def test_unknown_template_names_the_choices(files):
    with pytest.raises(ConfigError, match="neither a file nor a built-in") as raised:
        load_template("chatlm", files)
    assert "chatml" in raised.value.wanted


def test_template_that_is_not_jinja_is_an_error_with_its_line(files, tmp_path):
    path = tmp_path / "broken.jinja"
    path.write_text("fine\n{% for m in messages %}")
    with pytest.raises(DataError, match="not a jinja template") as raised:
        load_template(str(path), files)
    assert raised.value.where.startswith("broken.jinja:2")


def test_template_runs_sandboxed(files):
    with pytest.raises(DataError):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}", PROBES["one turn"], {})


def test_callback_gives_results_and_errors_row_by_row(files):
    source = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('not this one') }}{% endif %}{{ messages[0].content }}"
    )
    block = callback(ChatTemplate(source, "t"), SPECIAL)
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("yes", "no", "é")]
    assert block(rows) == [("yes", []), "not this one", ("é", [])]


def test_render_by_jinja2_that_never_ends_is_stopped_and_the_next_row_goes_on(monkeypatch):
    monkeypatch.setattr("rft.data.template._MAX_SECONDS", 0.3)
    source = (
        "{% if messages[0].content == 'no' %}{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}"
        "{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    block = callback(ChatTemplate(source, "t"), SPECIAL)
    rows = [
        json.dumps({"messages": [{"role": "user", "content": text}]}) for text in ("yes", "no", "after", "no", "end")
    ]
    stopped = "it does too much work: over 0.3 s for one chat"
    assert block(rows) == [("yes", []), stopped, ("after", []), stopped, ("end", [])]


def test_text_by_jinja2_that_grows_without_bounds_is_stopped(monkeypatch):
    monkeypatch.setattr("rft.data.template._MAX_CHARACTERS", 10_000)
    source = "{% for a in range(99999) %}{% for b in range(99999) %}text{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match="too much work"):
        render(source, PROBES["one turn"], {})


def test_control_tokens_that_the_model_lacks_are_named(files):
    assert spelled_control_tokens(load_template("chatml", files), files) == []
    assert "<|eot_id|>" in spelled_control_tokens(load_template("llama3", files), files)
