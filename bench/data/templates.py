"""Chat templates and masks: rows/s and MB/s of parse + render + mask against transformers and jinja2, and texts and spans equal to theirs.

    python bench/run.py data/templates -- --templates DIR [DIR ...] [--chats FILE.jsonl] [--tokenizer DIR]

--templates: folders of .jinja files, such as `trl/chat_templates` and `axolotl/utils/chat_templates/templates` of these packages'
wheels (`pip download --no-deps trl axolotl`, unpacked), or templates of real models. Each is rendered with 11 conversations, with
and without a generation prompt, by our engine and by transformers: text and generation spans must be the same, or both must refuse.
A template that differs anywhere is one that `rft prepare` leaves to jinja2.

--chats: rows {"messages": [...]}; without it, made-up ones of about 1.5 kB. CPU seconds of one thread, tokenizer left out on
every side. Masks of four chats a template are held against an oracle (`masks`). Then every template masks the first chats twice, filled in and rendered one by one: the digests must be equal.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from results import Results
from rft import _native
from rft.data.template import PROBES, _as_rows_are

NEEDS = "folders of chat templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
TIMED = ("chatml", "qwen2_5", "qwen3", "llama3_1", "Qwen2.5", "Qwen3-0.6B", "Llama-3.1", "gpt-oss", "Qwen3.5")
PEER_ROWS = 300
COMPARED_ROWS = 200


def main() -> None:
    arguments = parse()
    results = Results(arguments.results)
    templates = [path for folder in arguments.templates for path in sorted(Path(folder).glob("*.jinja"))]
    if not templates:
        raise SystemExit("no .jinja files in the folders given")
    exact(templates, results)
    with tempfile.TemporaryDirectory() as folder:
        chats = Path(arguments.chats) if arguments.chats else made_up(Path(folder) / "chats.jsonl")
        masks(templates, Path(folder), results)
        speed(templates, chats, results, tokenizer(arguments.tokenizer))
        filled_in(templates, chats, Path(folder), results, tokenizer(arguments.tokenizer))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", nargs="+", required=True, metavar="DIR")
    parser.add_argument("--chats", metavar="FILE")
    parser.add_argument("--tokenizer", metavar="DIR", help="holds tokenizer.json; its control tokens are looked for")
    parser.add_argument("--results", metavar="FILE")
    return parser.parse_args()


# ---- the same text and spans


def exact(templates: list[Path], results: Results) -> None:
    found: Counter[str] = Counter()
    for path in templates:
        source = path.read_text("utf-8")
        try:
            native = _native.Template(source, SPECIAL)
        except _native.NativeError as error:
            found["differs"] += 2 * len(PROBES)
            print(f"  {path.name}: {error}")
            continue
        for name, conversation in PROBES.items():
            for prompt in (False, True):
                verdict = compare(native, source, conversation, prompt)
                found[verdict] += 1
                if verdict not in ("same", "both refuse"):
                    print(f"  {path.parent.name}/{path.name}, {name!r}: {verdict}")
    for verdict in ("same", "both refuse", "differs", "only transformers renders", "only rft renders"):
        results.add("templates/exact", "rft", verdict.replace(" ", "_"), found[verdict])
    results.add("templates/exact", "rft", "templates", len(templates))


def compare(native: Any, source: str, conversation: dict[str, Any], prompt: bool) -> str:
    wanted = by_transformers(source, conversation, prompt)
    try:
        text, spans = native.render(json.dumps(_as_rows_are(conversation), ensure_ascii=False), prompt)
        got = (text, [tuple(span) for span in spans])
    except _native.NativeError:
        got = None
    if wanted is None or got is None:
        return "both refuse" if wanted == got else "only rft renders" if got else "only transformers renders"
    return "same" if wanted == got else "differs"


def by_transformers(
    source: str, conversation: dict[str, Any], prompt: bool
) -> tuple[str, list[tuple[int, int]]] | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, spans = render_jinja_template(
            [conversation["messages"]],
            tools=conversation.get("tools"),
            chat_template=source,
            return_assistant_tokens_mask=True,
            add_generation_prompt=prompt,
            **SPECIAL,
        )
    except Exception:  # templates raise anything
        return None
    return texts[0], [tuple(span) for span in spans[0]]


# ---- masks, by an oracle that knows nothing of how they are found

ORACLE = {
    "two turns": [("user", "Ask-kiwi?"), ("assistant", "Say-plum."), ("user", "Ask-fig?"), ("assistant", "Say-lime.")],
    "system": [("system", "Rule-pear."), ("user", "Ask-kiwi?"), ("assistant", "Say-plum.")],
    "two by one": [("user", "Ask-kiwi?"), ("assistant", "Say-plum."), ("assistant", "Say-lime.")],
    "long": [(role, f"{word}-{n}-end.") for n in range(6) for role, word in (("user", "Ask"), ("assistant", "Say"))],
}
END = re.compile(r"\s{0,2}(<[^<>\n]{1,30}>|\[/?[A-Z_]{2,20}\]|<\uff5c[^<>\n]{1,30}\uff5c>)")


def masks(templates: list[Path], folder: Path, results: Results) -> None:
    """Each chat's trained text against the text of transformers and where the words of its messages stand in it.

    Trained has to be: of every assistant turn the whole content; of other turns nothing; nothing before the place where
    the model starts to speak (the text of the chat before it, with the generation prompt); the token that follows the content.
    """
    found: Counter[str] = Counter()
    for path in templates:
        source = path.read_text("utf-8")
        rows = folder / "oracle.jsonl"
        chats = [[{"role": role, "content": text} for role, text in turns] for turns in ORACLE.values()]
        rows.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
        try:
            masked = _native.masked_rows(spec(source, rows, words(source)))
        except _native.NativeError as error:
            found["template refused"] += 1
            print(f"  {path.name}: {str(error).splitlines()[0]}")
            continue
        for name, chat, documents in zip(ORACLE, chats, masked, strict=True):
            if isinstance(documents, str):
                refused = by_transformers(source, {"messages": chat}, False) is None
                found["chat refused by the template" if refused else "refused"] += 1
                if not refused:
                    print(f"  {path.name}, {name!r}: {documents}")
                continue
            if by_transformers(source, {"messages": chat}, False) is None:
                found["refused by transformers alone"] += 1  # `exact` tells: jinja2 renders this template
                continue
            wrong = [fault for text, spans in documents for fault in judge(source, chat, text, spans, len(documents))]
            found["wrong" if wrong else "right"] += 1
            for fault in wrong[:2]:
                print(f"  {path.name}, {name!r}: {fault}")
    for verdict in (
        "right",
        "wrong",
        "refused",
        "chat refused by the template",
        "template refused",
        "refused by transformers alone",
    ):
        results.add("templates/masks", "rft", verdict.replace(" ", "_"), found[verdict])


def judge(
    source: str, chat: list[dict[str, Any]], text: str, spans: list[tuple[int, int]], documents: int
) -> list[str]:
    """What is wrong with a document's spans."""
    faults = []
    written: list[dict[str, Any]] | None = None
    if documents == 1:
        # templates for images and text write a content only where it is a list of parts, and nothing for a string
        parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in chat]
        given = [(form, by_transformers(source, {"messages": form}, False)) for form in (chat, parts)]
        written, rendered = next(((form, r) for form, r in given if r is not None and r[0] == text), (None, None))
        if written is None or rendered is None:
            return ["its text is not that of transformers, whether contents are strings or lists of parts"]
        if rendered[1]:  # the template's own tags decide
            return [] if rendered[1] == [tuple(span) for span in spans] else ["its spans are not the template's"]
    trained = "".join(text[start:end] for start, end in spans)
    for index, message in enumerate(chat):
        content = message["content"]
        if documents == 1 and message["role"] == "assistant":
            assert written is not None
            at = text.find(content)
            span = next(((start, end) for start, end in spans if start <= at and at + len(content) <= end), None)
            if at < 0 or span is None:
                faults.append(f"{content!r} is not trained whole")
                continue
            before = by_transformers(source, {"messages": written[:index]}, True)
            if before and text.startswith(before[0]) and span[0] < len(before[0]):
                faults.append(f"what stands before {content!r} is trained: {text[span[0] : at]!r}")
            token = END.match(text, at + len(content))
            if token and token.end() > span[1] and not in_next_header(source, written, index, token.group(1)):
                faults.append(f"{token.group()!r} behind {content!r} is not trained")
        elif message["role"] != "assistant" and content in trained:
            faults.append(f"{content!r} is trained")
    return faults


def in_next_header(source: str, chat: list[dict[str, Any]], index: int, token: str) -> bool:
    """Whether a token behind a turn belongs to the next one: the chat that ends with the turn does not end with it."""
    upto = by_transformers(source, {"messages": chat[: index + 1]}, False)
    return upto is None or not upto[0].rstrip().endswith(token)


def words(source: str) -> dict[str, Any]:
    """A tokenizer whose control tokens are what a template spells like one."""
    spelled = set(re.findall(r"<[^<>\s'\"{}]{1,30}>|\[/?[A-Z_]{2,20}\]", source))
    return tokenizer(None, sorted(spelled))


# ---- speed


def speed(templates: list[Path], chats: Path, results: Results, tokens: dict[str, Any]) -> None:
    size = chats.stat().st_size
    rows = [json.loads(line) for line in chats.read_bytes().splitlines()[:PEER_ROWS]]
    part = sum(len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in rows)
    for path in [path for path in templates if any(name in path.stem for name in TIMED)]:
        source, case = path.read_text("utf-8"), f"templates/{path.stem}"
        try:
            count, made, _, _, _, seconds = _native.measure_rows(spec(source, chats, tokens), 3)
        except _native.NativeError as error:
            results.error(case, "rft", str(error))
            continue
        if made < count / 2:
            print(f"  {path.name}: takes {made} of {count} chats, not timed")
            continue
        results.add(case, "rft", "mb_per_second", [size / 1e6 / second for second in seconds])
        results.add(case, "rft", "rows_per_second", [count / second for second in seconds])
        for system, render in (("transformers", transformers_masks), ("jinja2", jinja2_text)):
            began = time.process_time()
            try:
                render(source, rows)
            except Exception as error:
                results.error(case, system, f"{type(error).__name__}: {error}")
                continue
            spent = time.process_time() - began
            results.add(case, system, "mb_per_second", part / 1e6 / spent)
            results.add(case, system, "rows_per_second", len(rows) / spent)


def transformers_masks(source: str, rows: list[dict[str, Any]]) -> None:
    """What apply_chat_template does before it tokenises: text and generation spans (none where the template has no tags)."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for row in rows:
        render_jinja_template([row["messages"]], chat_template=source, return_assistant_tokens_mask=True, **SPECIAL)


def jinja2_text(source: str, rows: list[dict[str, Any]]) -> None:
    """Text alone, the template compiled once."""
    from rft.data.template import render

    for row in rows:
        render(source, row, SPECIAL)


# ---- filled in = rendered


def filled_in(templates: list[Path], chats: Path, folder: Path, results: Results, tokens: dict[str, Any]) -> None:
    few = folder / "few.jsonl"
    few.write_bytes(b"\n".join(chats.read_bytes().splitlines()[:COMPARED_ROWS]))
    differ = 0
    for path in templates:
        request = spec(path.read_text("utf-8"), few, tokens)
        try:
            filled, rendered = (_native.measure_rows(request, 0, fill)[4] for fill in (True, False))
        except _native.NativeError:
            continue  # told by `exact`
        if filled != rendered:
            differ += 1
            print(f"  {path.name}: chats that are filled in differ from rendered ones")
    results.add("templates/filled-in", "rft", "templates_that_differ", differ)


def spec(source: str, chats: Path, tokens: dict[str, Any]) -> str:
    return json.dumps(
        {
            "format_version": _version(),
            "sources": [{"path": str(chats), "format": "messages"}],
            "tokenizer": tokens,
            "template": source,
        }
    )


def _version() -> int:
    from rft.data.prepare import FORMAT_VERSION

    return FORMAT_VERSION


def tokenizer(folder: str | None, more: Sequence[str] = ()) -> dict[str, Any]:
    """A tokenizer for its control tokens: the folder's, or one of single bytes."""
    if folder:
        text = (Path(folder) / "tokenizer.json").read_text("utf-8")
    else:
        special = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "</s>", "<s>"]
        special = list(dict.fromkeys([*special, *more]))
        added = [
            {"id": index, "content": token, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
            for index, token in enumerate(special)
        ]  # fmt: skip
        model = {"type": "BPE", "vocab": {token: index for index, token in enumerate(special)}, "merges": []}
        text = json.dumps({"version": "1.0", "added_tokens": added, "model": model})
    return {"json": text, "special": SPECIAL, "add_bos": False, "eos_id": 3, "bos_id": None, "vocab_size": 1 << 20}


def made_up(path: Path, rows: int = 4000) -> Path:
    """Chats of one to four questions, about 1.5 kB each."""
    words = [
        "the",
        "model",
        "reads",
        "a",
        "row",
        "and",
        "learns",
        "what",
        "follows",
        "it,",
        "line",
        "by",
        "line,",
        "with",
        "numbers",
        "like",
        "3.14",
        "and",
        "names",
    ]
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            messages = [{"role": "system", "content": "You are a helpful assistant."}] if row % 3 == 0 else []
            for turn in range(1 + row % 4):
                say = " ".join(words[(row * 7 + turn + word * 5) % len(words)] for word in range(40 + row % 60))
                messages += [
                    {"role": "user", "content": say[:200] + "?"},
                    {"role": "assistant", "content": say + "\nDone."},
                ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


if __name__ == "__main__":
    main()
