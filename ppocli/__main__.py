"""``python -m ppocli``."""

from ppocli.cli.app import main

main()
