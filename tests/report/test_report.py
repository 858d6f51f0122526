"""report.html from a run directory that was written by hand."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from rft.errors import ConfigError
from rft.report import write_report
from rft.report.read import read_run
from rft.report.sets import TOKENS_SHOWN, cut, fill_histogram, length_histogram
from rft.report.units import count, duration, gib, percent, rate
from support.run_directory import train_line, write_run_directory


class Outline(HTMLParser):
    """Plain text, the tags with their attributes, and whether every element is closed."""

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(run) -> Outline:
    return Outline(write_report(run).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """The page of a finished run of 60 steps."""
    return write_report(write_run_directory(tmp_path_factory.mktemp("report") / "first-run")).read_text(
        encoding="utf-8"
    )


def test_report_shows_the_numbers_of_the_run(text):
    page = Outline(text)
    assert not page.open
    for words in (
        "first-run",
        "SmolLM2-135M-Instruct · LoRA r 16 · finished",
        "2.400 → 1.909",
        "best 1.909 at step 60",
        "388 tok/s",
        "2.0 GiB",
        "empty 20, bad row 4",
        "6,214",
        "1.31 M",
        "71 %",
        "99.6 %",
        "30 / 30",
        "F.rms_norm",
        "fp32 2.4e-7, bf16 3.9e-3",
        "needs CUDA",
        "config.resolved.toml",
    ):
        assert words in page.text, words


def test_every_curve_is_there_with_its_data(text):
    page = Outline(text)
    figures = [attrs["id"] for tag, attrs in page.tags if tag == "figure"]
    assert figures == [
        f"plot-{n}" for n in ("loss", "lr", "grad_norm", "tokens_per_second", "mfu", "memory", "seconds")
    ]
    # the held-out curve has one marker for each of the seven evaluations
    svg = re.search(r'id="plot-loss".*?</figure>', text, re.S)[0]
    assert svg.count("<use ") >= 7
    for title in ("Loss per label token (nats)", "Learning rate", "Peak memory (GiB)"):
        assert title in page.text


def test_page_is_self_contained_and_runs_nothing(text):
    page = Outline(text)
    assert "script" not in {tag for tag, _ in page.tags}
    for tag, attrs in page.tags:
        for key in ("src", "href", "srcset", "data", "poster", "action"):
            assert attrs.get(key, "#").startswith(("#", "data:")), (tag, attrs)
        assert not any(key.startswith("on") for key in attrs)
    assert not re.search(r"@import|url\((?!#)", text)


def test_ids_are_unique_and_every_reference_has_its_target(text):
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'(?:href="#|url\(#)([^")]+)', text):
        assert target in ids


def test_colours_of_the_plots_follow_the_scheme_of_the_page(text):
    svg = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert "var(--series-1)" in svg
    assert not re.findall(r"#[0-9a-fA-F]{6}", svg)


def test_text_of_a_run_cannot_become_markup(tmp_path):
    run = write_run_directory(tmp_path / "run")
    receipts = {"applied": [{"what": "<script>alert(1)</script>", "count": 1, "of": 1, "how": "<b>"}]}
    (run / "receipts.json").write_text(json.dumps(receipts))
    page = page_of(run)
    assert "script" not in {tag for tag, _ in page.tags}
    assert "<script>alert(1)</script>" in page.text


def test_unfinished_run_with_a_torn_last_line_is_shown_up_to_there(tmp_path):
    run = write_run_directory(tmp_path / "run", steps=12, finished=False)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 13, "lo')
    page = page_of(run)
    assert "not finished: last logged step is 12" in page.text
    assert "Could not be read" not in page.text


def test_steps_that_a_resume_ran_again_count_once_with_their_later_values(tmp_path):
    run = write_run_directory(tmp_path / "run", steps=5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**train_line(4, 5), "loss": 0.25}) + "\n")
    steps, losses = read_run(run).series("loss")
    assert steps == [1, 2, 3, 4, 5]
    assert losses[3] == 0.25


@pytest.mark.parametrize("missing", ["receipts.json", "data.json", "metrics.jsonl"])
def test_missing_file_leaves_its_section_out_and_says_so(tmp_path, missing):
    run = write_run_directory(tmp_path / "run")
    (run / missing).unlink()
    page = page_of(run)
    assert not page.open
    assert {"receipts.json": "no receipts.json", "data.json": "no data.json", "metrics.jsonl": "no step yet"}[
        missing
    ] in page.text


def test_run_of_a_single_step_has_its_points(tmp_path):
    page = page_of(write_run_directory(tmp_path / "run", steps=1))
    assert [a["id"] for t, a in page.tags if t == "figure"][:2] == ["plot-loss", "plot-lr"]


def test_how_a_format_was_decided_is_said_once_for_training_and_held_out_rows(tmp_path):
    run = write_run_directory(tmp_path / "run")
    data = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps({**data, "eval": data["train"]}))
    assert write_report(run).read_text().count("messages: 100 of the first 100 rows") == 1


def test_a_legend_lies_below_its_plot_and_never_over_the_title(text):
    plot = re.search(r'id="plot-seconds">.*?</figure>', text, re.S)[0]
    height = {
        word: max(
            float(y)
            for y in re.findall(rf'translate\([\d.]+ ([\d.]+)\)[^>]*>{word}<|y="([\d.]+)"[^>]*>{word}<', plot)
            for y in y
            if y
        )
        for word in ("Seconds per step, by phase", "step", "optimizer", "backward")
    }
    assert height["Seconds per step, by phase"] < height["step"] < min(height["optimizer"], height["backward"])


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"kind": "eval", "step": 7}', '{"kind": "train", "step": "2"}', '{"kind": "train", "step": 7, "loss": "low"}',
     '{"kind": "train", "step": 7, "seconds": {"step": "x"}}', '{"kind": "train", "step": 7, "tokens_per_second": []}'],
)  # fmt: skip
def test_a_damaged_line_of_the_metrics_never_costs_the_page(tmp_path, text):
    run = write_run_directory(tmp_path / "run")
    path = run / "metrics.jsonl"
    path.write_text(text + "\n" + path.read_text())
    page = write_report(run).read_text()
    assert "</html>" in page
    if "eval" not in text and "seconds" not in text:
        assert "metrics.jsonl:1: not" in page


def test_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run"):
        write_report(tmp_path)


def test_length_histogram_counts_every_document_once():
    lengths = [*range(1, 1000), 50_000]
    histogram = length_histogram(lengths)
    assert sum(histogram.counts) == 1000
    assert histogram.counts[-1] >= 1
    assert "up to 50,000" in histogram.title
    assert len(histogram.edges) == len(histogram.counts) + 1


def test_fill_histogram_zooms_in_where_every_pack_is_full():
    full = fill_histogram([1024, 1024, 1000], 1024)
    assert full.edges[0] == 90
    assert full.counts[-1] == 2
    loose = fill_histogram([1024, 100], 1024)
    assert loose.edges[0] == 0
    assert sum(loose.counts) == 2


def test_long_sample_is_cut_to_where_the_training_begins():
    texts = [f"w{i} " for i in range(1000)]
    kinds = ["masked"] * 700 + ["trained"] * 300
    spans, num_cut = cut(texts, kinds)
    assert spans[0][0].startswith("… 580 tokens before\nw580 ")
    assert spans[-1][1] == "trained"
    assert num_cut == 0
    spans, num_cut = cut(texts, ["trained"] * 1000)
    assert len("".join(t for t, _ in spans).split()) == TOKENS_SHOWN
    assert num_cut == 1000 - TOKENS_SHOWN


def test_numbers_carry_units_and_sensible_lengths():
    assert [count(v) for v in (0, 9_999, 12_345, 1_310_000, 999_960, 8.03e9)] == [
        "0", "9,999", "12.3 k", "1.31 M", "1.00 M", "8.03 B",
    ]  # fmt: skip
    assert [gib(v) for v in (45.1 * 2**30, 512 * 2**20, 12 * 2**20)] == ["45.1 GiB", "0.5 GiB", "12 MiB"]
    assert [duration(v) for v in (0.4, 38, 59.7, 292, 11_220)] == [
        "0.4 s",
        "38 s",
        "1 min 0 s",
        "4 min 52 s",
        "3 h 07 min",
    ]
    assert [rate(v) for v in (2e-4, 1.67e-4, 0)] == ["2e-4", "1.67e-4", "0"]
    assert [percent(v) for v in (0.714, 0, 1, 0.004)] == ["71 %", "0 %", "100 %", "0.4 %"]
