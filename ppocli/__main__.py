"""``python -m ppocli``."""

import os
import site
import sys
from pathlib import Path

if not sys.flags.safe_path and os.path.realpath(sys.path[0] or ".") == os.path.realpath("."):
    # a file or folder in the current folder must not hide an installed library of its name
    sys.path.append(sys.path.pop(0))

from ppocli.cli.app import main

# the processes of a run don't look into the current folder: they shall find this very package
root = str(Path(__file__).resolve().parents[1])
if root not in (*site.getsitepackages(), site.getusersitepackages()):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))

main()
