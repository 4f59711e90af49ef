"""What ``ppocli`` offers is what it says, whichever of its parts is loaded."""

import importlib
import pkgutil

import ppocli


def test_no_room_hides_a_public_name():
    """A package ``ppocli.train`` would take the place of the function once it is imported."""
    assert {name for _, name, _ in pkgutil.iter_modules(ppocli.__path__)}.isdisjoint(
        ppocli.__all__)
    for name in ppocli.__all__:
        assert callable(getattr(importlib.import_module("ppocli"), name)) or name == "__version__"
