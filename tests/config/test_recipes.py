"""Everything that is shown to be copied decodes: the recipes, and the TOML of the README and the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rft.config.load import load_config
from rft.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "python" / "rft" / "recipes").glob("*.toml"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}:{page.read_text(encoding='utf-8')[: match.start()].count(chr(10)) + 1}")
    for page in PAGES
    for match in re.finditer(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for block in [match[1]]
]


def test_there_are_recipes():
    assert len(RECIPES) >= 6


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_decodes_and_its_first_line_says_what_it_is_for(recipe):
    load_config(recipe, check_files=False)
    assert recipe.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("block", BLOCKS)
def test_toml_in_the_docs_decodes(block, tmp_path):
    """A block that shows only some tables is completed with a model and data, and may then not hold a wrong key."""
    text = block
    if "[model]" not in text:
        text += '\n[model]\npath = "org/model"\n'
    if "data.train]" not in text:
        text += '\n[[data.train]]\npath = "rows.jsonl"\n'
    (tmp_path / "block.toml").write_text(text, encoding="utf-8")
    try:
        load_config(tmp_path / "block.toml", check_files=False)
    except ConfigError as error:
        if error.problem != "is missing" or not error.where.endswith(".path"):
            raise
