"""How much memory and disk a run needs, computed before any weight is loaded.

Start in ``memory``: sums of bytes. ``outline`` makes the models of a run as shapes without memory,
``check`` compares the sums with what is free before a run loads weights.
"""
