"""Responses from a policy: the decode loop, transformers' ``generate``, vLLM servers, episodes.

Start with ``sampler`` (the ``Sampler`` protocol) and ``decoding`` (the loop).
Rooms from ``training`` upward may import it.
"""
