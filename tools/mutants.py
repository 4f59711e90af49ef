"""Whether the tests notice what they are there to notice: faults put into the code by hand, one at
a time, each with the tests that must fail for it.

``python tools/mutants.py`` runs them all (a few minutes), ``python tools/mutants.py early_stop``
only those named. The code is copied first; the checkout is never touched. ``tests/unit/
test_mutants.py`` keeps the list true to the code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("ppocli", "tests", "tools", "conf", "recipes", "pyproject.toml")
SECONDS = 300
"""that the tests of one mutant may take"""
PASSED, FAILED = 0, 1
"""exit codes of pytest; all others mean that tests could not be run"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault."""

    name: str
    file: str
    """below the checkout"""
    original: str
    """a snippet that stands in the file exactly once"""
    mutated: str
    tests: tuple[str, ...]
    """ids as pytest takes them; at least one of these fails"""


MATH, LOSSES = "tests/unit/test_ppo_math.py", "tests/unit/test_ppo_losses.py"
ADVANTAGES, TASK = "tests/unit/test_ppo_advantages.py", "tests/unit/test_ppo_task.py"
INVARIANTS, GENERATION = "tests/unit/test_invariants.py", "tests/unit/test_generation.py"

MUTANTS = (
    # the algorithm
    Mutant("gae_without_lambda", "ppocli/ppo/advantages.py",
           "samples.gamma * lam * running", "samples.gamma * running",
           (f"{ADVANTAGES}::test_gae_by_hand",)),
    Mutant("whiten_unbiased", "ppocli/ppo/shaping.py",
           "torch.rsqrt(var + 1e-8)", "torch.rsqrt(var * mask.sum() / (mask.sum() - 1) + 1e-8)",
           (f"{MATH}::test_whiten_by_hand",)),
    Mutant("advantages_not_centred", "ppocli/ppo/step.py",
           "whiten(advantages, accepted, center=True)",
           "whiten(advantages, accepted, center=False)",
           (f"{TASK}::test_whitened_advantages_have_no_mean",)),
    Mutant("k3_mirrored", "ppocli/ppo/kl.py",
           "torch.expm1(-cut) + cut", "torch.expm1(cut) - cut",
           (f"{MATH}::test_kl_estimators_by_hand",)),
    Mutant("rounding_charged", "ppocli/ppo/experience.py",
           "in_reward and moved else 0.0", "in_reward else 0.0",
           ("tests/integration/test_learning.py"
            "::test_a_reward_that_never_differs_leaves_the_policy_where_it_was",)),
    Mutant("dropped_weights_kept", "ppocli/ppo/losses.py",
           "ratio.masked_fill(outside, 0.0)", "ratio",
           (f"{LOSSES}::test_weights_that_are_clipped_or_dropped_by_hand",)),
    Mutant("controller_unclipped", "ppocli/ppo/kl.py",
           "min(max(sequence_kl / target - 1.0, -0.2), 0.2)", "sequence_kl / target - 1.0",
           (f"{MATH}::test_controller_numbers",)),
    Mutant("clip_sides_swapped", "ppocli/ppo/losses.py",
           "ratio.clamp(1.0 - options.cliprange, 1.0 + high)",
           "ratio.clamp(1.0 - high, 1.0 + options.cliprange)",
           (f"{LOSSES}::test_asymmetric_and_dual_clip_by_hand",)),
    Mutant("policy_loss_optimistic", "ppocli/ppo/losses.py",
           "loss = torch.maximum(unclipped, clipped)", "loss = torch.minimum(unclipped, clipped)",
           (f"{LOSSES}::test_policy_loss_by_hand",)),
    Mutant("value_unclipped", "ppocli/ppo/losses.py",
           "torch.maximum(square, square_clipped)", "square",
           (f"{LOSSES}::test_value_loss_by_hand",)),
    Mutant("dual_clip_on_both_signs", "ppocli/ppo/losses.py",
           "(advantages < 0) & (loss > bound)", "loss > bound",
           (f"{LOSSES}::test_asymmetric_and_dual_clip_by_hand",)),
    Mutant("token_weights_without_length", "ppocli/ppo/losses.py",
           "1.0 / (lengths.clamp(min=1).float() * samples)",
           "ones / max(total_samples, 1)",
           (f"{LOSSES}::test_loss_equals_the_naive_reference_however_it_is_cut",)),
    Mutant("warm_up_from_zero", "ppocli/training/updates.py",
           "(update + 1) / (warmup + 1)", "update / (warmup + 1)",
           (f"{MATH}::test_schedule_values",)),
    Mutant("moments_without_distance", "ppocli/ppo/shaping.py",
           "self.m2 + other.m2 + delta * delta * self.count * other.count / count",
           "self.m2 + other.m2",
           (f"{MATH}::test_moments_merge_to_the_moments_of_all",)),
    # what is learnt from
    Mutant("score_on_the_last_column", "ppocli/ppo/advantages.py",
           "last = (mask.sum(dim=1) - 1).clamp(min=0)",
           "last = (mask.sum(dim=1) * 0 + mask.shape[1] - 1)",
           (f"{ADVANTAGES}::test_score_lands_on_the_last_valid_token_of_each_sample",)),
    Mutant("kl_paid_out", "ppocli/ppo/advantages.py",
           "rewards = -kl_coef * kl", "rewards = kl_coef * kl",
           (f"{ADVANTAGES}::test_score_lands_on_the_last_valid_token_of_each_sample",)),
    Mutant("early_stop", "ppocli/ppo/ppo_task.py",
           "EARLY_STOP = 1.5", "EARLY_STOP = 1.0",
           (f"{TASK}::test_the_verdict_on_an_update",)),
    Mutant("sequence_kl_per_token", "ppocli/ppo/experience.py",
           "k1.double().sum(1).mean()", "k1.double().sum() / rollout.response_mask.sum()",
           (f"{TASK}::test_the_kl_of_a_sequence_is_the_sum_over_its_tokens",)),
    Mutant("episodes_begin_again", "ppocli/ppo/ppo_task.py",
           "start = state.episodes + ", "start = 0 * state.episodes + ",
           (f"{TASK}::test_a_step_collects_from_where_the_one_before_ended",)),
    Mutant("one_order_for_all_epochs", "ppocli/ppo/step.py",
           "default_rng([session.cfg.seed, step, *number])",
           "default_rng([session.cfg.seed, step])",
           (f"{TASK}::test_each_pass_over_the_samples_has_an_order_of_its_own",)),
    # the engine
    Mutant("skipped_update_made", "ppocli/training/optimize.py",
           "if verdict is Verdict.STEP:", "if verdict is not Verdict.STOP:",
           (f"{INVARIANTS}::test_a_ratio_beyond_the_threshold_touches_nothing",)),
    Mutant("non_finite_never_forgotten", "ppocli/training/optimize.py",
           "self.nonfinite + 1 if verdict is Verdict.NONFINITE else 0",
           "self.nonfinite + (verdict is Verdict.NONFINITE)",
           (f"{INVARIANTS}::"
            "test_a_nonfinite_gradient_touches_nothing_and_ends_the_run_when_it_lasts",)),
    Mutant("worst_is_best", "ppocli/training/loop.py",
           "figure > best.metric", "figure < best.metric",
           (f"{TASK}::test_the_best_evaluation_is_the_highest_finite_one",)),
    Mutant("row_stays_pending", "ppocli/training/loop.py",
           "commit(run, replace(run.state, pending=None))", "commit(run, run.state)",
           ("tests/faults/test_resume.py::"
            "test_resuming_at_a_step_equals_the_straight_run",)),
    Mutant("generators_taken_at_saving", "ppocli/training/loop.py",
           "task, state = run.task, run.state\n",
           "task = run.task\n    "
           "state = replace(run.state, generators=Generators.now(task.backend.device))\n",
           ("tests/faults/test_fault_signals.py::"
            "test_a_stop_anywhere_saves_says_how_to_go_on_and_goes_on_exactly"
            "[after scoring-term]",)),
    # sampling
    Mutant("end_is_no_action", "ppocli/sampling/decode_state.py",
           "self.mask[rows, at] = alive",
           "self.mask[rows, at] = alive & ~torch.isin(chosen, self.stops)",
           (f"{GENERATION}::test_responses_end_with_any_stop_id_and_hold_nothing_after_it",)),
    Mutant("shortest_one_too_short", "ppocli/sampling/token_choice.py",
           "(position < spec.min_new_tokens)", "(position + 1 < spec.min_new_tokens)",
           (f"{GENERATION}::test_an_end_may_be_chosen_once_that_many_tokens_are_there",)),
    Mutant("noise_of_the_row", "ppocli/sampling/sampler.py",
           "uniform(seed, stream, prompts.episodes, spec.max_new_tokens)",
           "uniform(seed, stream, range(len(prompts)), spec.max_new_tokens)",
           (f"{TASK}::test_a_sample_depends_on_its_episode_not_on_its_row",)),
    # on a device
    Mutant("ended_rows_move_on", "ppocli/sampling/decode_state.py",
           "live.positions[:, -1:] + (~live.done)[:, None]", "live.positions[:, -1:] + 1",
           ("tests/unit/test_refill.py::test_a_row_that_has_ended_among_younger_ones_takes_no_"
            "position_that_the_model_lacks",)),
    Mutant("waits_for_every_token", "ppocli/sampling/decoding.py",
           'device.type == "cpu" else CHECK_EVERY', 'device.type == "cpu" else 1',
           ("tests/unit/test_accelerator.py::"
            "test_what_runs_on_a_simulated_accelerator[test_waits.py-not slow]",)),
    # storage
    Mutant("hash_unchecked", "ppocli/runs/manifest.py",
           'verify == "full" or name', 'verify == "never" or name',
           ("tests/unit/test_checkpoints_damage.py::"
            "test_size_verification_misses_only_what_it_says",)),
    Mutant("renamed_before_synced", "ppocli/runs/checkpoints.py",
           "    atomic.sync_tree(staging)\n", "",
           ("tests/unit/test_checkpoints_crashes.py::"
            "test_a_power_cut_at_any_point_leaves_a_valid_step",)),
    Mutant("best_is_pruned", "ppocli/runs/retention.py",
           "kept = {*valid[-keep_last:], *keep_steps}", "kept = {*valid[-keep_last:]}",
           ("tests/unit/test_checkpoints_saving.py::test_prune_keeps_the_newest_and_the_best",)),
    Mutant("rows_cut_one_too_early", "ppocli/runs/run_logs.py",
           "and step > last_step", "and step >= last_step",
           ("tests/unit/test_run_logs.py::test_truncate_keeps_the_rest_byte_for_byte",)),
    Mutant("first_ratios_unchecked", "ppocli/ppo/step_metrics.py",
           "DECODING_GAP = 0.01", "DECODING_GAP = 100.0",
           ("tests/integration/test_seams.py"
            "::test_old_logprobs_that_are_not_the_policy_s_are_found_by_the_first_ratios",)),
)


def mutated_text(mutant: Mutant, root: Path = ROOT) -> str:
    """The whole file with the fault in it.

    Raises:
        ValueError: the snippet does not stand in the file exactly once.
    """
    text = (root / mutant.file).read_text(encoding="utf-8")
    count = text.count(mutant.original)
    if count != 1:
        raise ValueError(f"{mutant.name}: found {count} times in {mutant.file}, not once: "
                         f"{mutant.original!r}")
    return text.replace(mutant.original, mutant.mutated)


def copy_checkout(target: Path) -> None:
    """What tests need, without caches."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name,
                            ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target / name)


def run_tests(folder: Path, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Pytest's exit code in a copy, None where it took too long, and what it said."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1",
                   "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider",
               *tests]
    try:
        done = subprocess.run(command, cwd=folder, env=environment, text=True, check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"longer than {seconds:.0f} s"
    return done.returncode, done.stdout


def verdict_on(mutant: Mutant, folder: Path) -> str:
    """``killed``, ``SURVIVED`` or why neither can be said; the copy is as before afterwards."""
    path = folder / mutant.file
    text = path.read_text(encoding="utf-8")
    path.write_text(mutated_text(mutant, folder), encoding="utf-8")
    try:
        code, said = run_tests(folder, mutant.tests, SECONDS)
    finally:
        path.write_text(text, encoding="utf-8")
    if code == FAILED:
        return "killed"
    return "SURVIVED" if code == PASSED else f"NOT RUN: {said.strip().splitlines()[-1]}"


def say(text: str) -> None:
    """A line at once, also into a pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    """Run the mutants that are asked for; 1 if one is not killed."""
    parser = argparse.ArgumentParser(description="Put faults into a copy of the code, one at a "
                                     "time, and see that the tests named for them fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run (default: all)")
    asked = parser.parse_args(words).names
    unknown = sorted(set(asked) - {mutant.name for mutant in MUTANTS})
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}")
    chosen = [mutant for mutant in MUTANTS if not asked or mutant.name in asked]
    with tempfile.TemporaryDirectory(prefix="ppocli-mutants-") as name:
        folder = Path(name)
        copy_checkout(folder)
        tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        code, said = run_tests(folder, tests, SECONDS * 2)
        if code != PASSED:  # a test that fails anyway would kill everything
            say(f"the tests fail on the code as it is:\n{said}")
            return 1
        left = 0
        for mutant in chosen:
            begun = time.monotonic()
            verdict = verdict_on(mutant, folder)
            left += verdict != "killed"
            say(f"{mutant.name:30} {mutant.file:36} {verdict} ({time.monotonic() - begun:.0f} s)")
    say(f"{len(chosen) - left} of {len(chosen)} killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
