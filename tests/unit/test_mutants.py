"""The list of ``make mutants`` fits the code: each snippet is there once, and so is each test."""

from collections import Counter
from pathlib import Path

import pytest

from tools.mutant_list import Mutant
from tools.mutants import ROOT, mutated_text
from tools.mutants_of_rooms import MUTANTS


def test_mutants_fit_the_code():
    for mutant in MUTANTS:
        assert mutated_text(mutant) != (ROOT / mutant.file).read_text(encoding="utf-8")
        compile(mutated_text(mutant), mutant.file, "exec")
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(
                encoding="utf-8"), mutant.name


def test_each_room_has_eight_with_names_of_their_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 90
    rooms = {path.parent.name for path in ROOT.glob("ppocli/*/__init__.py")} - {"builtin"}
    counts = Counter(Path(mutant.file).parts[1] for mutant in MUTANTS)
    assert {room: counts[room] for room in rooms if counts[room] < 8} == {}


@pytest.mark.parametrize(("text", "count"), [("", 0), ("b = 1\nb = 1\n", 2)])
def test_a_snippet_that_is_not_there_once_is_refused(tmp_path: Path, text: str, count: int):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ValueError, match=f"m: found {count} times in a.py"):
        mutated_text(Mutant("m", "a.py", "b = 1", "b = 2", ()), tmp_path)
