"""What holds for every test: offline, one thread, an empty current folder, a home and a cache of
the session's own, and random number generators that are put back."""

import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

pytest_plugins = ("run_fixtures", "judged")

# Here, because torch and huggingface_hub read them once, when they are imported.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a home and a cache folder, which its xdist workers and their commands
    inherit, so that no test depends on what a person has set up or downloaded; and a key, so that
    no test makes a person's."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # as a shell starts what it puts in the background; commands would ignore Ctrl-C as well
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("PYTEST_XDIST_WORKER") is not None:
        return
    config.stash[_CACHE] = folder = tempfile.mkdtemp(prefix="ppocli-tests-")
    os.environ["XDG_CACHE_HOME"] = folder
    os.environ["PPOCLI_KEY_FILE"] = os.path.join(folder, "key")
    os.environ["HOME"] = os.path.join(folder, "home")
    os.mkdir(os.environ["HOME"])
    os.environ.pop("XDG_CONFIG_HOME", None)


def pytest_unconfigure(config: pytest.Config) -> None:
    os.chdir(config.invocation_params.dir)
    folder = config.stash.get(_CACHE, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test, and the fixtures made for it, begin in an empty folder: in the checkout they
    would see the runs, prompts and recipes that somebody has made there. Folders of earlier tests
    leave ``sys.path``, as their modules have the names of later ones."""
    if not _PATH:
        _PATH.extend(sys.path)
    sys.path[:] = _PATH
    os.chdir(tempfile.mkdtemp(dir=os.environ["XDG_CACHE_HOME"]))


_CACHE = pytest.StashKey[str]()
_PATH: list[str] = []
"""``sys.path`` as it was when all tests were collected"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _random_state_restored() -> Iterator[None]:
    """No test sees how many random numbers another one drew."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    torch_state = torch.get_rng_state() if torch else None
    yield
    random.setstate(state)
    if numpy:
        numpy.random.set_state(numpy_state)
    if torch:
        torch.set_rng_state(torch_state)
