"""The page for those who come from trlX and TRL names only what there is."""

import re
from pathlib import Path

import pytest

from ppocli.config.keys import schema_keys

PAGE = Path(__file__).parents[2] / "docs/coming-from-trlx-and-trl.md"
TABLE = re.compile(r"^\|(?!-|\s*trlX)(.+)\|$", re.MULTILINE)
SECTIONS = sorted({key.split(".")[0] for key in schema_keys()})
KEY = re.compile(rf"^(?:{'|'.join(SECTIONS)})(?:\.\w+)*(?==|$)")


def ours() -> list[str]:
    """Everything in code quotes in the third column of the tables."""
    found = []
    for row in TABLE.findall(PAGE.read_text(encoding="utf-8")):
        cells = row.split("|")
        assert len(cells) == 4, row
        found += re.findall(r"`([^`]+)`", cells[2])
    return found


def test_the_tables_are_read():
    assert len(ours()) > 80


@pytest.mark.parametrize("name", sorted(set(ours())))
def test_what_is_named_as_ours_exists(name):
    keys = schema_keys()
    if match := KEY.match(name):
        key, _, value = name.partition("=")
        # that each key is read somewhere, another test holds
        assert match[0] in keys
        choices = keys[key].metadata.get("choices")
        assert not (value and choices) or value in choices or value.startswith(("RUN", "["))
    elif name.startswith("ppocli "):
        from typer.testing import CliRunner

        from ppocli.cli.app import app

        given = name.split()
        options = [word for word in given[2:] if word.startswith("--")]
        told = CliRunner().invoke(app, [given[1], "--help"], env={"COLUMNS": "200"})
        assert told.exit_code == 0, told.output
        assert all(option in told.output for option in options)
    elif name.startswith("ppocli."):
        import ppocli

        assert hasattr(ppocli, name.removeprefix("ppocli."))
    else:
        # options of commands, values of keys and files of a run
        sources = [*Path(__file__).parents[2].glob("ppocli/**/*.py")]
        assert any(name in path.read_text(encoding="utf-8") for path in sources), name
