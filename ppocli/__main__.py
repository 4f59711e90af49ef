"""``python -m ppocli``."""

import os
import site
from pathlib import Path

from ppocli.cli.app import main

# the processes of a run don't look into the current folder: they shall find this very package
root = str(Path(__file__).resolve().parents[1])
if root not in (*site.getsitepackages(), site.getusersitepackages()):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))

main()
