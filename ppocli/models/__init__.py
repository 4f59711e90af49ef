"""Policy, value function and reference on transformers' models; forward passes; memory needed.

Start with ``policy``, then ``loading.language_model`` and ``passes``; ``kernels`` is what is fast.
Rooms from ``sampling`` upward may import it.
"""
