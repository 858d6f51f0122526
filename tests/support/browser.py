"""Debian's Chromium, headless: what a page asked of the network, what it wrote to the console, and how it looks."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Rendered:
    """A page after it was loaded."""

    console: list[str]
    requests: list[str]
    dom: str
    screenshot: Path


def chromium() -> str:
    """The program, or a skipped test that says why."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium: apt-get install chromium")


def render(page: Path, work: Path, *, dark: bool = False, height: int = 3000) -> Rendered:
    """Load a local page twice: once for its DOM, console and requests, once for a screenshot."""
    program = chromium()
    work.mkdir(parents=True, exist_ok=True)
    common = [
        program,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
        # what the browser itself would like to ask fails at once, network or none
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={work / 'profile'}",
        f"--window-size=1200,{height}",
    ]
    if dark:
        common.append("--blink-settings=preferredColorScheme=0")
    netlog, screenshot = work / "net.json", work / "page.png"
    first = [*common, "--enable-logging=stderr", f"--log-net-log={netlog}", "--dump-dom", page.resolve().as_uri()]
    done = subprocess.run(first, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line or "CONSOLE(" in line]
    shot = [*common, f"--screenshot={screenshot}", page.resolve().as_uri()]
    subprocess.run(shot, capture_output=True, timeout=120, check=True)
    return Rendered(console, requests_of(netlog), done.stdout, screenshot)


def requests_of(netlog: Path) -> list[str]:
    """Every URL that the page asked for, those of its own file and of data: left out.

    The browser asks for some itself (the time, an account): the log gives those "not an origin" as their initiator.
    """
    text = netlog.read_text()
    try:
        log = json.loads(text)
    except json.JSONDecodeError:  # the browser ended before it closed the list
        log = json.loads(text.rstrip().rstrip(",") + "]}")
    started = [e["params"] for e in log["events"] if "initiator" in e.get("params", {}) and "url" in e["params"]]
    urls = {params["url"] for params in started if params["initiator"] != "not an origin"}
    return sorted(url for url in urls if not url.startswith(("file:", "data:", "chrome:", "about:", "devtools:")))
