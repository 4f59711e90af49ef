"""What a step may cost: positions that go through layers and heads, gradients, updates, bytes.

Real steps of small models, counted by the operations they come to (``tests/work.py``). A change
that makes a step do more fails here, whatever the machine; one that makes it do less does too, and
then the number here is the one to change.
"""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import save_lm
from sessions import fresh_state, optimize, rollout_of, session_of, small_config
from torch.profiler import ProfilerActivity, profile
from work import HIDDEN, INNER, LAYERS, VOCABULARY, Work, save_work_lm

from ppocli.ppo.policy_samples import evaluate, evaluation_size, generate_chunks, share_of_prompts
from ppocli.ppo.rollout import Rollout, measure_chunk
from ppocli.ppo.step import collect_rollout, to_experience
from ppocli.sampling.decode_state import SHRINK_AT
from ppocli.training.state import Moment, PhaseClock
from ppocli.training.task import OptimizeResult

PRODUCTS = 2
"""matrices between a layer's width and its inner one"""
SAMPLES, EPOCHS, MINI, MICRO, LONGEST = 16, 2, 8, 4, 12
PADDED, FILLED = 0.03, 16
"""the share of padding above which rows are packed, and what packed tokens are a multiple of"""

pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Case:
    """A configuration, and how often a position goes through a layer, a lookup or a head."""

    keys: dict[str, Any]
    scored: int
    """layers, in scoring"""
    trained: int
    """layers that gradients flow back through, in an update"""
    run: int = LAYERS
    """layers, in an update"""
    scoring_passes: int = 1
    scoring_heads: int = 1
    scoring_values: int = 0
    decoded_values: int = 1
    update_passes: int = 1
    embedding_grads: bool = False
    head_grads: bool = False


CASES = {
    # in fp32 decoding has given the policy's logprobs and values: only the reference is asked
    "all layers": Case({}, scored=LAYERS, trained=LAYERS, embedding_grads=True, head_grads=True),
    # frozen layers ran in decoding, for all passes after it
    "top layer": Case({"model__num_layers_unfrozen": 1}, scored=1, trained=1, run=1),
    # the reference, and updates, go on from where the policy's frozen layers end
    "top layer in bf16": Case(
        {"hardware__precision": "bf16", "model__num_layers_unfrozen": 1}, scored=LAYERS + 1,
        trained=1, run=1, scoring_passes=2, scoring_heads=2, scoring_values=1),
    # the reference and the critic; not the policy
    "a critic of its own": Case(
        {"model__value__kind": "model"}, scored=2 * LAYERS, trained=2 * LAYERS, run=2 * LAYERS,
        scoring_passes=2, scoring_values=1, decoded_values=0, update_passes=2,
        embedding_grads=True, head_grads=True),
}


@dataclass(frozen=True, repr=False)
class Step:
    """One counted step."""

    case: Case
    work: Work
    rollout: Rollout
    result: OptimizeResult
    groups: int
    """of the optimizer"""

    @property
    def lengths(self) -> torch.Tensor:
        return self.rollout.response_mask.sum(1)

    @property
    def spans(self) -> torch.Tensor:
        """Positions of each sample that predict something or lead there: its last token doesn't."""
        return self.rollout.prompts.mask.sum(1) + self.lengths - 1

    @property
    def tokens(self) -> int:
        """Response tokens."""
        return int(self.lengths.sum())

    def count(self, phase: str, name: str) -> int:
        return self.work.phases[phase][name]


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that no two lengths share: most tokens of these models are no words."""
    return [float(len(ids)) for ids in completion_ids]


def passed(spans: torch.Tensor) -> int:
    """Positions of passes over rows of these lengths, neighbours in length together. A pass is as
    wide as its longest row, or where that pads too much it is one row of all tokens, filled up."""
    found = 0
    for rows in spans.sort().values.flip(0).split(MICRO):
        tokens, grid = int(rows.sum()), len(rows) * int(rows.max())
        found += tokens + -tokens % FILLED if 1.0 - tokens / grid > PADDED else grid
    return found


def updated(step: Step) -> int:
    """Positions of all updates of a step."""
    return sum(passed(step.spans[rows]) for epoch in range(EPOCHS)
               for rows in torch.from_numpy(np.random.default_rng([0, 0, epoch]).permutation(
                   SAMPLES)).split(MINI))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_work_lm(tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=(
    pytest.mark.slow if name == "top layer" else ())) for name in CASES])
def step(request: pytest.FixtureRequest, folder: Path) -> Step:
    case = CASES[request.param]
    cfg = small_config(folder, ppo__num_rollouts=SAMPLES, ppo__ppo_epochs=EPOCHS,
                       ppo__mini_batch_size=MINI, ppo__micro_batch_size=MICRO, seed=0,
                       ppo__optimizer__lr=1e-5,
                       generation__max_new_tokens=LONGEST,
                       generation__length_sampler=[2, LONGEST], **case.keys)
    work = Work()
    with session_of(cfg, reward=length) as session, work:
        # whose phases the counts are booked to
        clock = PhaseClock(session.backend.device, Moment.now(), work.mark)
        state = fresh_state(session)
        rollout = collect_rollout(session, session.context(clock=clock), 0, SAMPLES)
        experience = to_experience(rollout, state, session.cfg)
        clock.mark("other")
        result = optimize(session, experience)
        clock.mark("optimize")
        groups = len(session.trained.optimizer.param_groups)
    found = Step(case, work, rollout, result, groups)
    assert found.result.terms["grad_norm"] > 0
    # else nothing would be padded, and no row would end before others
    assert len(set(found.lengths.tolist())) > 4
    assert len(set(found.spans.tolist())) > 4
    assert passed(found.spans) < sum(len(rows) * int(rows.max()) for rows in
                                     found.spans.sort().values.flip(0).split(MICRO))
    # numbers of positions that could be taken for dimensions would be counted as the wrong thing
    assert max(chain(*found.work.passes.values())) < min(HIDDEN, INNER, VOCABULARY)
    return found


def test_decoding_runs_rows_only_as_long_as_they_live(step: Step):
    first, *later = step.work.passes["rollout"]
    width = step.rollout.prompts.tokens.shape[1]
    assert first <= SAMPLES * width
    assert len(later) == int(step.lengths.max()) - 1
    for t, rows in enumerate(later, 1):
        alive = int((step.lengths > t).sum())
        assert alive <= rows <= max(alive / SHRINK_AT, 1), t
    rows = SAMPLES + sum(later)  # one position of each row's prompt counts, the last
    assert step.count("rollout", "head") == rows
    assert step.count("rollout", "values") == step.case.decoded_values * rows
    assert step.count("rollout", "layers") == LAYERS * (first + sum(later))


def test_scoring_makes_the_passes_it_needs_and_no_other(step: Step):
    case, positions = step.case, passed(step.spans)
    assert step.count("scoring", "embedded") == case.scoring_passes * positions
    assert step.count("scoring", "layers") == case.scored * positions
    assert step.count("scoring", "head") == case.scoring_heads * step.tokens
    assert step.count("scoring", "values") == case.scoring_values * step.tokens


def test_an_update_runs_each_sample_once_and_heads_on_responses_only(step: Step):
    case, positions = step.case, updated(step)
    assert step.count("optimize", "embedded") == case.update_passes * positions
    assert step.count("optimize", "layers") == case.run * positions
    for name in ("head", "values", "head_back"):
        assert step.count("optimize", name) == EPOCHS * step.tokens, name
    assert step.count("optimize", "head_again") == 0
    assert step.result.tokens == positions


def test_gradients_are_computed_of_what_trains_and_no_further_down(step: Step):
    case, positions = step.case, updated(step)
    layers = case.trained * positions
    assert step.count("optimize", "layers_back") == layers
    assert step.count("optimize", "layer_grads") == PRODUCTS * layers
    assert step.count("optimize", "embedding_grads") == (
        case.embedding_grads * case.update_passes * positions)
    assert step.count("optimize", "head_grads") == case.head_grads * EPOCHS * step.tokens
    for phase in ("rollout", "reward", "scoring", "other"):
        found = {name for name, count in step.work.phases[phase].items() if count}
        assert found <= {"embedded", "layers", "head", "values"}, phase
    for phase in ("reward", "other"):
        assert not +step.work.phases[phase], phase


def test_the_optimizer_steps_once_an_update_with_one_operation_a_group(step: Step):
    updates = EPOCHS * SAMPLES // MINI
    assert step.result.updates == updates
    assert step.count("optimize", "steps") == updates * step.groups


def test_an_evaluation_asks_the_reference_once_and_the_policy_never_again(folder):
    """In fp32 and at temperature 1 decoding has given the policy's logprobs."""
    new = 8
    cfg = small_config(folder, ppo__micro_batch_size=MICRO, generation__max_new_tokens=new)
    work = Work()
    with session_of(cfg) as session, work:
        found = evaluate(session, session.context())
        work.mark("eval")
        count = evaluation_size(session)
        prompts = torch.tensor([len(ids) for ids in session.eval_prompts.token_ids])
    assert not any(sample["finished"] for sample in found.samples)
    assert found.tokens == count * new
    decoded = count * int(prompts.max()) + count * (new - 1)
    scored = passed(prompts + new - 1)
    assert work.phases["eval"]["head"] == 2 * count * new
    assert work.phases["eval"]["embedded"] == decoded + scored
    assert work.phases["eval"]["layers"] == LAYERS * (decoded + scored)


def peak_of(work: Any) -> int:
    """The most bytes that torch's allocator has given out meanwhile, over those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events()
              if event.name() == "[memory]"]
    assert events
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_logits_of_all_tokens_never_exist_at_once(tmp_path, monkeypatch):
    """A vocabulary beside which the rest of a small model is nothing, and a pass whose logits are
    more than may be kept."""
    vocabulary = 16381
    monkeypatch.setattr("ppocli.models.head.CHUNK_BYTES", 2**18)
    monkeypatch.setattr("ppocli.models.head.KEPT_BYTES", 2**20)
    save_lm(tmp_path / "lm", vocab_size=vocabulary)
    cfg = small_config(tmp_path, ppo__micro_batch_size=8, generation__max_new_tokens=24,
                       generation__length_sampler=[20, 24])
    with session_of(cfg) as session:
        state = fresh_state(session)
        rollout = rollout_of(session)
        experience = to_experience(rollout, state, session.cfg)
        optimize(session, experience)  # the optimizer's state is made
        updating = peak_of(lambda: optimize(session, experience))
        chunk, = generate_chunks(session, session.context(), session.policy, session.sampling,
                                 *share_of_prompts(session, 0, 16))
        scoring = peak_of(lambda: measure_chunk(
            session, session.context(), session.policy, chunk, forward=True))
        gradients = sum(4 * p.numel() for p in session.policy.parameters())
    logits = 4 * vocabulary * 8 * 20  # of the response tokens of one pass
    assert logits > 2**20
    assert updating - gradients < logits / 2
    assert scoring < logits / 2
