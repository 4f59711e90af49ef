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

from ppocli.ppo.step import collect_rollout, to_experience
from ppocli.sampling.decode_state import CHECK_EVERY, DecodeState
from ppocli.training.state import Moment, PhaseClock

NEW = 32


def phases_of(sim, session, count: int = 16, *, learn: bool = True) -> dict[str, Counter[str]]:
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
    rollout = collect_rollout(session, session.context(clock=clock), 0, count)
    if not learn:
        return found
    experience = to_experience(rollout, fresh_state(session), session.cfg)
    clock.mark("other")
    found["updates"] = Counter(made=optimize(session, experience).updates)
    clock.mark("optimize")
    return found


SAMPLED = {"generation__stop_token_ids": [5, 9, 14], "generation__max_new_tokens": NEW}
CASES = {
    "all layers": {}, "top layer": {"model__num_layers_unfrozen": 1},
    "adapters": {"model__peft": {"type": "lora", "r": 4, "lora_alpha": 8}},
    "a critic of its own": {"model__value__kind": "model"},
    "a KL in the loss": {"ppo__kl_in": "loss", "ppo__kl_estimator": "k3"},
}


@pytest.mark.parametrize("name", mostly_slow(CASES, quick=lambda name: name == "all layers"))
def test_a_step_waits_for_what_decides_and_no_more(sim, tmp_path, name):
    keys = CASES[name]
    cfg = small_config(tmp_path, hardware__device="cuda", ppo__ppo_epochs=2, **SAMPLED, **keys)
    with session_of(cfg, reward=count_letters) as session:
        phases_of(sim, session, 8)  # the optimizer's state is made
        found = phases_of(sim, session)
    rollout, updates = found["rollout"].total(), found["updates"].total()
    assert updates == 4
    # the last tokens of the longest response, and the fetching of the chunk
    assert rollout <= -(-NEW // CHECK_EVERY) + 1
    assert found["optimize"].total() == updates
    assert found["scoring"].total() <= 4  # logprobs, values and those of the reference, KL
    assert not found["reward"]
    assert not found["other"]


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
