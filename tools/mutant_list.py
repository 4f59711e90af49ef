"""The faults that ``tools/mutants.py`` puts into the code, each with the tests that must fail for
it: those of the algorithm and of what trains, samples and stores. The other rooms' are in
``tools/mutants_of_rooms.py``."""

from dataclasses import dataclass


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


def noticed_by(tests: str, *faults: tuple[str, str, str, str, str]) -> tuple[Mutant, ...]:
    """Faults that tests of one file notice.

    Args:
        faults: name, file of the package, original, mutated, test.
    """
    return tuple(Mutant(name, f"ppocli/{file}", original, mutated, (f"tests/{tests}::{test}",))
                 for name, file, original, mutated, test in faults)


MATH, LOSSES = "tests/unit/test_ppo_math.py", "tests/unit/test_ppo_losses.py"
ADVANTAGES, TASK = "tests/unit/test_ppo_advantages.py", "tests/unit/test_ppo_task.py"
INVARIANTS, GENERATION = "tests/unit/test_invariants.py", "tests/unit/test_generation.py"

ENGINE = (
    # the algorithm
    Mutant("gae_without_lambda", "ppocli/ppo/advantages.py",
           "samples.gamma * lam * running", "samples.gamma * running",
           (f"{ADVANTAGES}::test_gae_by_hand",)),
    Mutant("group_baseline_with_itself", "ppocli/ppo/advantages.py",
           "others = (_in_group(samples, missed) - missed) / (counts - 1).clamp(min=1)",
           "others = _in_group(samples, missed) / counts",
           (f"{ADVANTAGES}::test_group_baseline_by_hand",)),
    Mutant("group_baseline_never", "ppocli/ppo/experience.py",
           "group_baseline=ppo.group_baseline and ppo.n > 1", "group_baseline=False",
           (f"{TASK}::test_the_samples_of_a_prompt_are_the_critics_baseline_too",)),
    Mutant("gradient_of_the_head_is_a_view", "ppocli/models/head.py",
           "if len(more) > len(weight):", "if len(more) >= len(weight):",
           ("tests/unit/test_logits.py::test_logprobs_entropy_full_kl_and_gradients_are_those_of_"
            "their_definitions",)),
    Mutant("whiten_unbiased", "ppocli/ppo/losses.py",
           "torch.rsqrt(var + 1e-8)", "torch.rsqrt(var * mask.sum() / (mask.sum() - 1) + 1e-8)",
           (f"{MATH}::test_whiten_by_hand",)),
    Mutant("advantages_not_centred", "ppocli/ppo/step.py",
           "whiten(advantages, accepted, center=True)",
           "whiten(advantages, accepted, center=False)",
           (f"{TASK}::test_whitened_advantages_have_no_mean",)),
    Mutant("k3_mirrored", "ppocli/ppo/losses.py",
           "torch.expm1(-cut) + cut", "torch.expm1(cut) - cut",
           (f"{MATH}::test_kl_estimators_by_hand",)),
    Mutant("rounding_charged", "ppocli/ppo/step.py",
           'kl_in == "reward" and moved else', 'kl_in == "reward" else',
           ("tests/integration/test_learning.py"
            "::test_a_reward_that_never_differs_leaves_the_policy_where_it_was",)),
    Mutant("dropped_weights_kept", "ppocli/ppo/losses.py",
           "ratio.masked_fill(outside, 0.0)", "ratio",
           (f"{LOSSES}::test_weights_that_are_clipped_or_dropped_by_hand",)),
    Mutant("controller_unclipped", "ppocli/ppo/losses.py",
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
           "torch.maximum(square, clipped)", "square",
           (f"{LOSSES}::test_value_loss_by_hand",)),
    Mutant("dual_clip_on_both_signs", "ppocli/ppo/losses.py",
           "(advantages < 0) & (loss > bound)", "loss > bound",
           (f"{LOSSES}::test_asymmetric_and_dual_clip_by_hand",)),
    Mutant("token_weights_without_length", "ppocli/ppo/losses.py",
           "lengths.clamp(min=1).float() * samples", "samples",
           (f"{LOSSES}::test_loss_equals_the_naive_reference_however_it_is_cut",)),
    Mutant("warm_up_from_zero", "ppocli/training/optimize.py",
           "(update + 1) / (warmup + 1)", "update / (warmup + 1)",
           (f"{MATH}::test_schedule_values",)),
    Mutant("moments_without_distance", "ppocli/ppo/losses.py",
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
    Mutant("sequence_kl_per_token", "ppocli/ppo/rollout.py",
           "k1.double().sum(1).mean()", "k1.double().sum() / self.response_mask.sum()",
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
           "(verdict := task.judge(terms)) is Verdict.STEP",
           "(verdict := task.judge(terms)) is not Verdict.STOP",
           (f"{INVARIANTS}::test_a_ratio_beyond_the_threshold_touches_nothing",)),
    Mutant("non_finite_never_forgotten", "ppocli/training/optimize.py",
           "nonfinite + 1 if verdict is Verdict.NONFINITE else 0",
           "nonfinite + (verdict is Verdict.NONFINITE)",
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
    Mutant("shortest_one_too_short", "ppocli/sampling/samples.py",
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
    Mutant("waits_for_every_token", "ppocli/sampling/sampler.py",
           'device.type == "cpu" else CHECK_EVERY', 'device.type == "cpu" else 1',
           ("tests/unit/test_accelerator.py::"
            "test_what_runs_on_a_simulated_accelerator[not slow]",)),
    # storage
    Mutant("hash_unchecked", "ppocli/runs/retention.py",
           'verify == "full" or name', 'verify == "never" or name',
           ("tests/unit/test_checkpoints_damage.py::"
            "test_size_verification_misses_only_what_it_says",)),
    Mutant("renamed_before_synced", "ppocli/runs/atomic.py",
           "        sync_tree(staging)\n", "",
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

MORE_OF_THE_ENGINE = (
    *noticed_by(
        "unit/test_optimizers.py",
        ("decay_forgotten", "training/optimizers.py", '"weight_decay": cfg.weight_decay',
         '"weight_decay": 0.0', "test_momentum_decay_betas_and_eps_by_hand"),
        ("low_halves_lost", "training/optimizers.py", "**self.state.pop(master, {}), LOW: low}",
         "**self.state.pop(master, {}), LOW: low * 0}",
         "test_bf16_weights_move_as_their_fp32_copies_do")),
    *noticed_by(
        "unit/test_generation.py",
        ("nucleus_too_small", "sampling/samples.py", "sums - probabilities >= top_p",
         "sums >= top_p", "test_top_p_keeps_the_smallest_set_whose_probabilities_reach_it"),
        ("penalty_rewards_repetition", "sampling/samples.py",
         "logits * penalty, logits / penalty", "logits / penalty, logits * penalty",
         "test_a_repetition_penalty_gives_what_transformers_generate_gives"),
        ("least_share_is_a_difference", "sampling/samples.py", "+ math.log(spec.min_p)",
         "- spec.min_p", "test_what_may_be_drawn_is_what_transformers_processors_leave")),
    *noticed_by(
        "unit/test_vllm.py",
        ("asleep_without_weights_for_good", "sampling/vllm/vllm_sampler.py",
         "dropped = sleeps and self._adapter is None", "dropped = False",
         "test_servers_sleep_while_the_policy_trains[gpt2]"),
        ("base_of_an_adapter_dropped", "sampling/vllm/vllm_sampler.py",
         "server.sleep(1 if self._adapter is not None else 2)", "server.sleep(2)",
         "test_servers_sleep_while_the_policy_trains[llama]"),
        ("adapter_not_asked_for", "sampling/vllm/vllm_sampler.py",
         "return None if self._adapter is None else version", "return None",
         "test_an_adapter_is_sent_by_itself_under_a_new_name_each_time"),
        ("episodes_ahead_overtaken", "sampling/episode_sampler.py",
         "self._ahead = inner.ahead = begun", "self._ahead = begun",
         "test_episodes_are_played_one_step_ahead[Slow]")),
)
