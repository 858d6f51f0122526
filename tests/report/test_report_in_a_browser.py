"""report.html in headless Chromium: plots drawn, nothing on the console, nothing asked of any network."""

from __future__ import annotations

import pytest

from rft.report import write_report
from support.browser import render
from support.run_directory import write_run_directory

pytestmark = pytest.mark.slow


def share_of_colour(png, colour: tuple[int, int, int], within: int = 24) -> float:
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(png).convert("RGB")).astype(int)
    return float((np.abs(pixels - np.array(colour)).max(-1) <= within).mean())


@pytest.mark.parametrize(
    ("dark", "page", "series"),
    [(False, (251, 251, 250), (44, 111, 187)), (True, (21, 23, 26), (111, 177, 245))],
    ids=["light", "dark"],
)
def test_report_renders_without_console_errors_or_requests(tmp_path, dark, page, series):
    report = write_report(write_run_directory(tmp_path / "run", steps=120))
    rendered = render(report, tmp_path / "browser", dark=dark)
    assert rendered.console == []
    assert rendered.requests == []
    assert rendered.dom.count("<svg") == 7
    assert share_of_colour(rendered.screenshot, page, within=2) > 0.3  # the scheme's own background
    assert share_of_colour(rendered.screenshot, series) > 0.001  # curves in the scheme's own colour


def test_this_check_sees_requests_and_console_errors(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://127.0.0.1:9/x.png"><script>nothing.here()</script>')
    rendered = render(page, tmp_path / "browser")
    assert rendered.console
    assert any("127.0.0.1:9" in url for url in rendered.requests)
