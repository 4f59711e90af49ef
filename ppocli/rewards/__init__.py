"""From an import path to checked scores: calling reward functions, built-in ones, remote ones.

Start with ``resolve`` (from ``reward.fn`` to a callable) and ``scoring`` (samples to scores).
Rooms from ``environments`` upward may import it.
"""
