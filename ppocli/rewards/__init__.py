"""From an import path to checked scores: calling reward functions, built-in ones, remote ones.

Start with ``scoring`` (samples to scores); ``calls`` makes a call, ``score_checks`` checks the
answer, and ``resolve`` leads from ``reward.fn`` to a function.
Rooms from ``environments`` upward may import it.
"""
