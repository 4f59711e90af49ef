"""The list of ``make mutants`` fits the code: each snippet is there once, and so is each test."""

from pathlib import Path

import pytest

from tools.mutants import MUTANTS, ROOT, Mutant, mutated_text


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_code(mutant: Mutant):
    assert mutated_text(mutant) != (ROOT / mutant.file).read_text(encoding="utf-8")
    compile(mutated_text(mutant), mutant.file, "exec")
    for test in mutant.tests:
        file, _, function = test.partition("::")
        assert f"def {function.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_mutants_are_told_apart_by_their_names():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 25


@pytest.mark.parametrize(("text", "count"), [("", 0), ("b = 1\nb = 1\n", 2)])
def test_a_snippet_that_is_not_there_once_is_refused(tmp_path: Path, text: str, count: int):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ValueError, match=f"m: found {count} times in a.py"):
        mutated_text(Mutant("m", "a.py", "b = 1", "b = 2", ()), tmp_path)
