"""The engine on a simulated accelerator, in a process of its own (``tests/accelerator``)."""

from pathlib import Path

import pytest
from helpers import environment
from warm import begin

FOLDER = Path(__file__).parents[1] / "accelerator"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_what_runs_on_a_simulated_accelerator(which: str):
    # plugins that are loaded of themselves would come too late to what is forked
    process = begin(["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_timeout",
                     "-m", which, str(FOLDER)], cwd=FOLDER.parents[1],
                    env=environment(PPOCLI_SIMULATED="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"))
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert " passed" in out
