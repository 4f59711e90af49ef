"""``python -m ppocli.doctor.import_probe MODULE``: import it and print its version as JSON."""

from __future__ import annotations

import importlib
import json
import sys


def main(name: str) -> int:
    """Print ``{"version": ...}`` or ``{"error": ...}`` as the last line."""
    try:
        module = importlib.import_module(name)
        facts = {"version": str(getattr(module, "__version__", "unknown"))}
    except Exception as error:  # whatever an installation raises is the finding
        facts = {"error": " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])}
    sys.stdout.write("\n" + json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
