"""PPO for language models in one file of plain torch; read it from top to bottom.

`python docs/learn/ppo_in_one_file.py` teaches a tiny transformer to answer with rising digits.
ppocli does the same with any model and reward; a test holds both to the same numbers.
Shapes: B samples, T tokens of prompt and response. Column t of a [B, T-1] tensor belongs to the
token at t+1: its logprob, the value of the state before it, its reward.
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Settings:
    epochs: int = 4  # passes over each rollout
    minibatch: int = 32  # samples per update
    gamma: float = 1.0
    lam: float = 0.95
    clip: float = 0.2  # of the ratio and of the value's move
    vf_coef: float = 0.1
    kl_coef: float = 0.02
    kl_in_loss: bool = False  # False: charged in the reward of each token
    max_grad_norm: float = 1.0


class Trunk(nn.Module):
    """A causal transformer without its output layer: ids [B, T] -> states [B, T, D]."""

    def __init__(self, vocabulary: int, width: int = 64, longest: int = 32) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # counted from the first real token
        future = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.layers(self.words(ids) + self.positions(positions), mask=future)


class ActorCritic(nn.Module):
    """A policy and a value function on one trunk."""

    def __init__(self, trunk: nn.Module, head: nn.Module, value_head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head, self.value_head = trunk, head, value_head

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logprob of each token but the first, and value of the state before it; both [B, T-1]."""
        states = self.trunk(ids, mask)[:, :-1]
        logprobs = torch.log_softmax(self.head(states).float(), dim=-1)  # [B, T-1, V]
        values = self.value_head(states).view(states.shape[:2])
        return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1), values


@torch.no_grad()
def sample(model: ActorCritic, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Prompts [B, P], each followed by sampled tokens: [B, P + new_tokens]."""
    ids = prompts
    for _ in range(new_tokens):
        logits = model.head(model.trunk(ids, torch.ones_like(ids)))[:, -1]
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return ids


def token_rewards(scores: torch.Tensor, kl: torch.Tensor, response: torch.Tensor,
                  kl_coef: float) -> torch.Tensor:
    """-kl_coef * kl_t, and the score on the last response token (Ziegler et al. 2019, eq. 2)."""
    last = (response * torch.arange(1, response.shape[1] + 1)).argmax(dim=1)
    return (-kl_coef * kl).scatter_add(1, last[:, None], scores[:, None]) * response


def gae(rewards: torch.Tensor, values: torch.Tensor, response: torch.Tensor,
        gamma: float, lam: float) -> torch.Tensor:
    """Schulman et al. 2015, eq. 16; the value after a sample's last token is 0; [B, T-1]."""
    advantages, values = torch.zeros_like(rewards), values * response
    ahead = next_value = torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        ahead = (delta + gamma * lam * ahead) * response[:, t]
        advantages[:, t], next_value = ahead, values[:, t]
    return advantages


def whiten(x: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """Mean 0 and variance 1 over all response tokens of the rollout."""
    return (x - x[response].mean()) * torch.rsqrt(x[response].var(correction=0) + 1e-8) * response


@torch.no_grad()
def prepare(model: ActorCritic, reference: ActorCritic, ids: torch.Tensor, mask: torch.Tensor,
            response: torch.Tensor, scores: torch.Tensor, s: Settings) -> dict[str, torch.Tensor]:
    """What stays fixed while a rollout is learnt from; response: which tokens are the policy's."""
    (old_logprobs, old_values), (ref_logprobs, _) = model(ids, mask), reference(ids, mask)
    rewards = token_rewards(scores, old_logprobs - ref_logprobs, response,
                            kl_coef=0.0 if s.kl_in_loss else s.kl_coef)
    advantages = gae(rewards, old_values, response, s.gamma, s.lam)
    return {"ids": ids, "mask": mask, "response": response, "old_logprobs": old_logprobs,
            "old_values": old_values, "ref_logprobs": ref_logprobs,
            "returns": advantages + old_values, "advantages": whiten(advantages, response)}


def ppo_loss(model: ActorCritic, batch: dict[str, torch.Tensor], s: Settings) -> torch.Tensor:
    """Schulman et al. 2017, eq. 7 and 9, as a mean over response tokens; the KL by k3."""
    logprobs, values = model(batch["ids"], batch["mask"])
    ratio = torch.exp(logprobs - batch["old_logprobs"])
    advantages, returns = batch["advantages"], batch["returns"]
    policy = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - s.clip, 1 + s.clip))
    moved = (values - batch["old_values"]).clamp(-s.clip, s.clip)
    value = 0.5 * torch.max((values - returns) ** 2, (batch["old_values"] + moved - returns) ** 2)
    total = policy + s.vf_coef * value
    if s.kl_in_loss:
        log_ratio = batch["ref_logprobs"] - logprobs
        total = total + s.kl_coef * (log_ratio.exp() - 1 - log_ratio)
    return total[batch["response"]].mean()


def update(model: ActorCritic, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor],
           s: Settings) -> torch.Tensor:
    """One optimizer update on a minibatch; returns its loss."""
    optimizer.zero_grad()
    (loss := ppo_loss(model, batch, s)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
    optimizer.step()
    return loss.detach()


def main(steps: int = 40, digits: int = 10, new_tokens: int = 8, lr: float = 1e-3) -> None:
    torch.manual_seed(0)
    s = Settings()
    model = ActorCritic(Trunk(digits), nn.Linear(64, digits), nn.Linear(64, 1))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(1, steps + 1):
        ids = sample(model, torch.randint(digits, (128, 1)), new_tokens)
        scores = (ids[:, 1:] == (ids[:, :-1] + 1) % digits).float().mean(1)  # the reward
        mask = torch.ones_like(ids).bool()
        batch = prepare(model, reference, ids, mask, mask[:, 1:], scores, s)
        order = torch.cat([torch.randperm(len(ids)) for _ in range(s.epochs)])
        for rows in order.split(s.minibatch):
            update(model, optimizer, {name: x[rows] for name, x in batch.items()}, s)
        kl = (batch["old_logprobs"] - batch["ref_logprobs"]).sum(1).mean()
        print(f"step {step:2d}  reward {scores.mean():.2f}  KL {kl:.2f} nats")


if __name__ == "__main__":
    main()
