"""How often a step waits for the device, and that a wait or a tensor in the wrong place is found.

Every wait stops the host until the device has done all it was told, and leaves it idle until the
host has caught up. So few are left: which rows have ended is asked once in 16 tokens, a chunk of
responses is fetched in one copy, an update's guards read its figures once before weights change,
scoring fetches each figure once, and the clock waits at the end of each phase.
"""

from collections import Counter

import pytest
from helpers import mostly_slow
from sessions import count_letters, fresh_state, optimize, session_of, small_config
from simulated import MixedDevicesError

from ppocli.ppo.policy_samples import evaluate
from ppocli.ppo.step import collect_rollout, to_experience
from ppocli.sampling.decode_state import CHECK_EVERY, DecodeState
from ppocli.training.state import Moment, PhaseClock

NEW = 20


def phases_of(sim, session, *, learn: bool = True) -> dict[str, Counter[str]]:
    """The waits of one step, or of its rollout alone, by phase, each without the one that the clock
    makes at its end."""
    found: dict[str, Counter[str]] = {}

    def tell(name: str) -> None:
        waits = sim.take()
        marks = [why for why in waits if why.startswith("synchronize ppocli/training/state.py")]
        assert [waits.pop(why) for why in marks] == [1]
        found[name] = found.get(name, Counter()) + waits

    clock = PhaseClock(session.backend.device, Moment.now(), tell)
    sim.take()
    rollout = collect_rollout(session, session.context(clock=clock), 0, 8)
    if not learn:
        return found
    experience = to_experience(rollout, fresh_state(session), session.cfg)
    clock.mark("other")
    found["updates"] = Counter(made=optimize(session, experience).updates)
    clock.mark("optimize")
    return found


SAMPLED = {"generation__stop_token_ids": [5, 9, 14], "generation__max_new_tokens": NEW,
           "ppo__num_rollouts": 8, "ppo__mini_batch_size": 4, "prompts__eval__limit": 4}
CASES = {
    "all layers": {}, "top layer": {"model__num_layers_unfrozen": 1},
    "adapters": {"model__peft": {"type": "lora", "r": 4, "lora_alpha": 8}},
    "one row a pass": {"ppo__micro_batch_size": 1},
    "a critic of its own": {"model__value__kind": "model"},
    "a KL in the loss": {"ppo__kl_in": "loss", "ppo__kl_estimator": "k3"},
    "gspo": {"ppo__policy_loss": "gspo"},
}


@pytest.mark.parametrize("name", mostly_slow(CASES, quick=lambda name: name == "all layers"))
def test_a_step_waits_for_what_decides_and_no_more(sim, tmp_path, name):
    """An evaluation waits as a rollout does."""
    cfg = small_config(tmp_path, hardware__device="cuda", ppo__ppo_epochs=2, **SAMPLED,
                       **CASES[name])
    with session_of(cfg, reward=count_letters) as session:
        phases_of(sim, session)  # the optimizer's state is made
        found = phases_of(sim, session)
        evaluate(session, session.context())
        waits = sim.take()
    assert 2 <= waits.total() <= -(-NEW // CHECK_EVERY) + 1 + 2, waits
    rollout, updates = found["rollout"].total(), found["updates"].total()
    assert updates == 4
    # the last tokens of the longest response, and the fetching of the chunk
    assert rollout <= -(-NEW // CHECK_EVERY) + 1
    assert found["optimize"].total() == updates
    assert found["scoring"].total() <= 4  # logprobs, values and those of the reference, KL
    assert not found["reward"]
    assert not found["other"]


def test_places_that_are_taken_anew_cost_no_further_waits(sim, tmp_path):
    """With the places of ended responses taken by other prompts, some of them padded."""
    cfg = small_config(tmp_path, hardware__device="cuda", ppo__num_rollouts=8, ppo__chunk_size=4,
                       generation__max_new_tokens=NEW, generation__length_sampler=[4, NEW])
    with session_of(cfg, reward=count_letters) as session:
        passes = []
        session.policy.lm.base_model.register_forward_pre_hook(lambda *_: passes.append(sim))
        collect = collect_rollout(session, session.context(), 0, 8)
    assert len(set(collect.response_mask.sum(1).tolist())) > 4
    decoding = [why for why in sim.take().elements() if "/sampling/" in why]
    chunks = 2
    assert NEW < len(passes) < chunks * NEW  # else no place was taken anew
    assert len(decoding) <= -(-len(passes) // CHECK_EVERY) + chunks


@pytest.mark.slow
def test_stop_sequences_are_looked_for_in_text_which_waits_once_a_token(sim, tmp_path):
    cfg = small_config(tmp_path, hardware__device="cuda", generation__max_new_tokens=NEW,
                       generation__stop_sequences=["no such words"])
    with session_of(cfg) as session:
        found = phases_of(sim, session, learn=False)
    assert NEW <= found["rollout"].total() <= NEW + -(-NEW // CHECK_EVERY) + 1


def test_a_tensor_left_on_the_host_is_found(sim, tmp_path, monkeypatch):
    made = DecodeState.__init__

    def left(self, *args):
        made(self, *args)
        self.noise = self.noise.cpu()

    monkeypatch.setattr(DecodeState, "__init__", left)
    cfg = small_config(tmp_path, hardware__device="cuda")
    with session_of(cfg) as session, pytest.raises(MixedDevicesError, match="ppocli/sampling/"):
        phases_of(sim, session, learn=False)
    assert sim.mixed
    sim.mixed.clear()
