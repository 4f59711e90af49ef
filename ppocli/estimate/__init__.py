"""How much memory and disk a run needs, computed before any weight is loaded.

Start in ``memory``: sums of bytes, and the check that a run makes with them. ``outline`` makes the
models of a run as shapes without memory.
"""
