"""Responses from a policy: the decode loop, transformers' ``generate``, vLLM servers, episodes.

Start with ``sampler`` (the ``Sampler`` protocol, and the loop in ``decode``).
Rooms from ``training`` upward may import it.
"""
