"""The commands: options in, a function of another room called, text out.

Start with ``app``, which lists the commands; ``train`` is the main one, ``options`` and ``output``
are shared.
No other room imports this one.
"""
