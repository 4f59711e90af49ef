"""The PPO algorithm as pure functions of tensors and numbers.

Notation used throughout: ``B`` samples, ``R`` response tokens (right-padded), ``N`` response
tokens laid flat, ``V`` vocabulary size, ``mask`` true on response tokens through the
end-of-sequence token.
"""
