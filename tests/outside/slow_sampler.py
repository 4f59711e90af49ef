"""A sampler that ppocli knows nothing of: one whole forward pass per token, noise of its own.

As a user's file, found by ``rollout.engine=slow_sampler.py:Whole``.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ppocli.errors import ConfigError
from ppocli.runs import faults
from ppocli.sampling.sampler import SamplerSetup
from ppocli.sampling.samples import Generation, Samples, single_turn


class Whole:
    """Draws by the largest of logits and Gumbel noise, which depends on a sample's number alone."""

    repeatable = True
    logprobs_match = False
    """they are not even computed"""

    def __init__(self, setup: SamplerSetup, *, sharpness: float = 1.0) -> None:
        self.setup, self.sharpness = setup, sharpness

    @contextmanager
    def acting(self, policy) -> Iterator:
        yield policy

    def sample(self, prompts, spec, stream, model, stop, *, at_once, chunk) -> Iterator[Samples]:
        for start in range(0, len(prompts), chunk):
            rows = range(start, min(start + chunk, len(prompts)))
            parts = [self._drawn(prompts.rows(rows[i:i + at_once]), spec, stream, model, stop)
                     for i in range(0, len(rows), at_once)]
            yield Samples.joined(parts)

    def converse(self, *_, **__):
        raise ConfigError("Whole plays no episodes.", where="rollout.engine, env.fn",
                          fix="use rollout.engine=decode")

    @torch.no_grad()
    def _drawn(self, prompts, spec, stream, model, stop) -> Samples:
        found = []
        rows = zip(prompts.tokens, prompts.mask, prompts.episodes, strict=True)
        for padded, mask, number in rows:
            noise = torch.Generator().manual_seed(1_000_003 * stream + number)
            said, ids = [], padded[mask]
            while len(said) < spec.max_new_tokens and not (said and said[-1] in spec.stop_ids):
                faults.point("rollout.token", len(prompts))
                stop.check()
                logits = model.lm(input_ids=torch.cat([ids, torch.tensor(said).long()])[None],
                                    use_cache=False).logits[0, -1].float()
                uniform = torch.rand(len(logits), generator=noise).clamp(min=1e-9)
                said.append(int((self.sharpness * logits - (-uniform.log()).log()).argmax()))
            found.append(said)
        width = max(map(len, found))
        mask = torch.tensor([[t < len(said) for t in range(width)] for said in found])
        tokens = torch.tensor([said + [0] * (width - len(said)) for said in found])
        zeros = torch.zeros(mask.shape)
        ended = torch.tensor([said[-1] in spec.stop_ids for said in found])
        return single_turn(prompts.tokens, prompts.mask,
                           Generation(tokens, mask, zeros, zeros, ended), None)
