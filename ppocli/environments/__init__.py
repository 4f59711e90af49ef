"""Episodes: the user's environment classes, how they are called, and the games that ship.

Start with ``registry`` (from ``env.fn`` to a class) and ``env_calls`` (reset and step).
``sampling`` and the rooms above it may import it.
"""
