"""The PPO algorithm whole: step, rollout, rewards to advantages, losses, KL, off-policy terms.

Start with ``step``, the algorithm on one page; ``ppo_task`` hands it to the loop. The formulas
(``advantages``, ``losses``) import torch alone.

Notation used throughout: ``B`` samples, ``R`` response tokens (right-padded), ``N`` response
tokens laid flat, ``V`` vocabulary size, ``mask`` true on response tokens through the
end-of-sequence token.
"""
