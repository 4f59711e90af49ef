"""The keys a user types: schema, defaults, ranges, composition by Hydra, all problems at once.

Start with ``schema`` (the keys), then ``compose`` (words to one typed configuration) and
``problems``.
Every room may import this one.
"""
