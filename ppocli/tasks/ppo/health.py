"""Signs of a run going wrong, each with its probable cause and what to do."""

from __future__ import annotations

from dataclasses import replace

from ppocli.tasks.ppo.records import PPOState, Rollout
from ppocli.tasks.ppo.session import Session

PATIENCE = 3
"""steps in a row before a sign is spoken of"""

ADVICE = {
    "negative_kl": "The KL to the reference is negative ({kl:.2f} nats per sample): the tokens are "
                   "not drawn from the policy's own distribution{why}, or the model computes "
                   "differently in rollout and scoring.",
    "no_spread": "All rewards of a rollout are equal ({reward:g}) for {n} steps: there is nothing "
                 "to learn from. Check that the reward reads the response, that its label or "
                 "pattern occurs, and that prompts vary.",
    "full_length": "Every response ran to the full {tokens} tokens for {n} steps: the policy never "
                   "ends one. Raise generation.max_new_tokens, set reward.missing_eos_penalty, or "
                   "give generation.stop_sequences.",
    "empty": "Every response is empty for {n} steps: the policy ends at once. Raise "
             "generation.min_new_tokens, or check that the reward does not favour empty text.",
    "kl_runaway": "The KL to the reference is {kl:.0f} nats per sample: "
                  "the policy is leaving the language it started from. Raise "
                  "ppo.init_kl_coef or lower ppo.optimizer.lr.",
}


def _signs(session: Session, rollout: Rollout, kl: float) -> dict[str, bool]:
    scores = [s for s, ok in zip(rollout.scores, rollout.valid.tolist(), strict=True) if ok]
    lengths = rollout.response_mask.sum(1)
    can_end = bool(session.sampling.stop_ids or session.sampling.stop_sequences)
    return {
        "negative_kl": kl < -0.5,
        "no_spread": len(scores) > 1 and max(scores) == min(scores),
        "full_length": (can_end and session.sampling.max_new_tokens > 1
                        and not bool(rollout.finished.any())
                        and int(lengths.min()) == session.sampling.max_new_tokens),
        "empty": all(not r.strip() for r in rollout.responses),
        "kl_runaway": kl > 50.0,
    }


def watch(session: Session, rollout: Rollout, state: PPOState, kl: float
          ) -> tuple[PPOState, list[str]]:
    """Count unhealthy signs; speak once each time one has lasted ``PATIENCE`` steps.

    Returns:
        the state with its counters, and the sentences to show.
    """
    health = dict(state.health)
    messages = []
    for name, present in _signs(session, rollout, kl).items():
        health[name] = health.get(name, 0) + 1 if present else 0
        if health[name] == PATIENCE:
            why = "" if session.sampling.is_policy_distribution else \
                " (top-k, top-p, min_new_tokens or greedy sampling)"
            messages.append(ADVICE[name].format(
                kl=kl, n=PATIENCE, tokens=session.sampling.max_new_tokens, why=why,
                reward=rollout.scores[0] if rollout.scores else 0.0))
    return replace(state, health=health), messages
