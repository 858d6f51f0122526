"""Run inside the clean environment: everything of rft comes from the wheel, and what the wheel asks for is there.

check_wheel.py ENVIRONMENT CHECKOUT
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement


def main(environment: Path, checkout: Path) -> None:
    """Raises AssertionError with what is missing or comes from elsewhere."""
    kernels = sorted(path.stem for path in (checkout / "kernels").glob("*.py") if path.stem != "__init__")
    names = ["rft", "rft._native", "rft.kernels", *(f"rft.kernels.{name}" for name in kernels)]
    for name in names:
        found = Path(importlib.import_module(name).__file__ or "")
        assert environment in found.parents, f"{name} comes from {found}, not from the wheel"
    package = Path(sys.modules["rft"].__file__ or "").parent
    in_checkout = {
        path.relative_to(checkout / "python" / "rft")
        for path in (checkout / "python" / "rft").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }
    missing = sorted(str(path) for path in in_checkout if not (package / path).is_file())
    assert not missing, f"not in the wheel: {missing}"
    for text in requires("rft-llm") or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert version(requirement.name) in requirement.specifier, (
                f"{requirement}, and {version(requirement.name)} is there"
            )
    print(f"from the wheel: {len(names)} modules imported, {len(in_checkout)} files there, requirements met")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
