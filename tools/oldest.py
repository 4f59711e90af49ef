"""The oldest release of everything that pyproject.toml allows, as constraints of pip: what
``make test-oldest`` installs. Written from the bounds themselves, which are so put to the test.

    python tools/oldest.py > build/oldest.txt
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent


def oldest(pyproject: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Name -> the lowest version of its bound, of every dependency and those of the tests.

    Raises:
        ValueError: a dependency has no lower bound.
    """
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    found = {}
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        requirement = Requirement(text)
        lowest = [s.version for s in requirement.specifier if s.operator == ">="]
        if not lowest:
            raise ValueError(f"{text} in {pyproject.name} has no lower bound")
        found[requirement.name] = lowest[0]
    return found


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}=={version}\n" for name, version in oldest().items())
