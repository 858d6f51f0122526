"""The repository itself: what holds it together beside the code."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"


def tracked(*patterns: str) -> list[Path]:
    """Files that git tracks or would."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_no_file_names_a_place_of_one_machine():
    """Paths of a home, a workplace or a temporary folder, and hosts of package registries, mean nothing elsewhere."""
    pattern = re.compile(
        r"(?<![\w./-])/(?:work|root|home/\w+|tmp)/\w|https?://[\w.]*(?:pypi|pythonhosted|crates)\.\w+|/\.library\b"
    )
    found = []
    for path in tracked():
        if path.suffix in {".lock", ".safetensors", ".gguf", ".png"} or path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


def test_kernels_is_one_folder_under_two_names_and_reaches_the_wheel():
    link = ROOT / "python" / "rft" / "kernels"
    assert link.is_symlink()
    assert link.resolve() == ROOT / "kernels"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "python/rft/kernels/**/*.py" in project["tool"]["maturin"]["include"]


def test_only_the_data_package_calls_the_extension():
    callers = set()
    for path in (ROOT / "python" / "rft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if any("_native" in f"{module}.{name}".split(".") for name in names):
                callers.add(path.relative_to(ROOT / "python" / "rft").parts[0])
    assert callers <= {"data"}


def test_the_version_is_the_same_everywhere():
    import rft

    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    assert cargo["workspace"]["package"]["version"] == rft.__version__
    assert f"## {rft.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_links_in_the_docs_lead_somewhere():
    broken = []
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_make_target_that_the_docs_name_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run", *(ROOT / "docs").rglob("*.md")]
    named = {
        name
        for page in pages
        for name in re.findall(r"(?:`|\$ |ok\" |\" )make ([a-z-]+)", page.read_text(encoding="utf-8"))
    }
    assert named >= {"quickstart", "test", "lint"}
    assert named <= targets


# ---- a skipped acceptance test fails in CI


@pytest.mark.parametrize(
    ("ci", "reason", "status"),
    [
        ("true", "needs ../shared/data", "failed"),
        ("true", "needs a GPU", "skipped"),
        ("", "needs ../shared/data", "skipped"),
    ],
)
@pytest.mark.parametrize("where", ["in the test", "in the module", "by a mark"])
def test_an_acceptance_test_that_is_skipped_fails_in_ci_where_its_data_is(tmp_path, ci, reason, status, where):
    tests = tmp_path / "main" / "tests"
    tests.mkdir(parents=True)
    (tmp_path / "shared").mkdir()
    (tests / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    text = {
        "in the test": f"import pytest\ndef test_x():\n    pytest.skip({reason!r})\n",
        "in the module": f"import pytest\npytest.skip({reason!r}, allow_module_level=True)\n",
        "by a mark": f"import pytest\n@pytest.mark.skipif(True, reason={reason!r})\ndef test_x():\n    pass\n",
    }[where]
    (tests / "test_x.py").write_text(text, encoding="utf-8")
    env = {**os.environ, "CI": ci}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    failed = "1 failed" in done.stdout or "1 error" in done.stdout
    assert ("failed" if failed else "skipped") == status, done.stdout


# ---- benches


def test_every_bench_says_what_it_measures_and_what_it_needs():
    done = subprocess.run(
        [sys.executable, "bench/run.py", "--list"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert set(lines) == {
        f"{p.parent.name}/{p.stem}" for p in (ROOT / "bench").glob("*/*.py") if not p.name.startswith("_")
    }
    for name, line in lines.items():
        assert len(line.split(None, 1)) == 2, f"{name} does not say what it measures"
        if name.startswith("kernels/"):
            assert "GPU" in line.rpartition("[needs")[2], f"{name} would run on a machine without a GPU"


def test_result_lines_are_what_the_target_check_reads(tmp_path):
    checker = SHARED / "tools" / "check_targets.py"
    if not checker.is_file():
        pytest.skip("needs ../shared/tools/check_targets.py")
    program = (
        "import sys; sys.path.insert(0, 'bench')\nfrom results import Results\n"
        f"r = Results({str(tmp_path / 'r.jsonl')!r}, device='NVIDIA H200')\n"
        "r.add('pack/bfd/10m', 'rft', 'seconds', [0.06, 0.07, 0.05])\nr.add('pack/bfd/10m', 'llama-factory', 'seconds', [2.4])\n"
        "r.error('store/qwen3', 'axolotl', 'no')\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
    line = json.loads((tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert (line["median"], line["low"], line["high"], line["n"]) == (0.06, 0.05, 0.07, 3)
    command = [sys.executable, str(checker), str(tmp_path), "--case", "pack/bfd/10m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_quickstart_builds_once_installs_no_tools_and_says_a_line_a_stage(tmp_path):
    """With pip, cargo and maturin replaced by programs that are as talkative as the real ones."""
    bin_folder = tmp_path / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    calls = tmp_path / "calls"
    talk = f'#!/bin/bash\necho "${{0##*/}} $*" >> {calls}\ncat > /dev/null\nseq 500\n'
    make_rft = f"printf '#!/bin/bash\\necho trained\\n' > {bin_folder}/rft; chmod +x {bin_folder}/rft\n"
    for name, text in {"python": talk, "maturin": talk + make_rft, "cargo": talk}.items():
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"}
    command = ["make", "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", "--no-print-directory"]
    done = subprocess.run(
        [*command, "quickstart"], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert lines[-1] == "trained"
    told = calls.read_text().splitlines()
    assert sum(line.startswith("maturin develop") for line in told) == 1
    assert not any(" dev" in line and "python" in line for line in told)

    (bin_folder / "maturin").write_text("#!/bin/bash\necho the reason\nexit 3\n")
    (tmp_path / "venv" / ".stamps" / "native").unlink()
    failed = subprocess.run(
        [*command, "quickstart"], env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert failed.returncode != 0
    assert "the reason" in failed.stdout
    assert "native.log" in failed.stdout
