"""Faults in the rooms around the engine, in the form of ``tools/mutant_list.py``; each room of the
package has at least eight, ``builtin`` apart, which only holds files."""

from tools.mutant_list import ENGINE, MORE_OF_THE_ENGINE, noticed_by

SAVING = "unit/test_checkpoints_saving.py"
STORAGE = (
    *noticed_by(
        SAVING,
        ("damaged_steps_pruned", "runs/retention.py", "step not in kept and step < oldest_kept",
         "step not in kept", "test_prune_does_not_count_damaged_steps_as_kept"),
        ("one_too_many_kept", "runs/retention.py", "valid[-keep_last:], *keep", "valid, *keep",
         "test_prune_keeps_the_newest_and_the_best"),
        ("replaced_by_the_same", "runs/checkpoints.py",
         "return same_state and saved", "return same_state or saved",
         "test_saving_a_step_in_another_state_replaces_it")),
    *noticed_by(
        "unit/test_run_folder.py",
        ("pid_of_another_counts", "runs/run_folder.py",
         "return _start_ticks(owner.pid) == owner.started", "return True",
         "test_stale_names_are_taken_over")),
    *noticed_by(
        "unit/test_run_logs.py",
        ("torn_line_kept", "runs/run_logs.py", "return file.tell() == size", "return False",
         "test_truncate_drops_a_torn_last_line")),
)

DATA = (
    *noticed_by(
        "unit/test_data_prompt_set.py",
        ("padding_counts", "data/data_set.py", ">= width - lengths[:, None]",
         "< width - lengths[:, None]", "test_batches_are_left_padded"),
        ("one_order_for_all_passes", "data/data_set.py", "_order(n, seed, epoch)",
         "_order(n, seed, 0)", "test_seeds_and_epochs_differ"),
        ("first_rows_evaluated", "data/prompt_set.py", "[i * count // picked for i",
         "[i for i", "test_without_own_source_they_are_spread_over_the_training_prompts"),
        ("metadata_not_in_digest", "data/data_set.py",
         "[ids, [self.columns[name][i] for name in names]]",
         "[ids, []]", "test_the_digest_notices_changes"),
        ("heaviest_source_rounded_down", "data/data_set.py", "np.floor(rest * share + 0.5)",
         "np.floor(rest * share)", "test_the_shares_of_a_mix_are_exact_up_to_rounding"),
        ("one_word_too_many", "data/chat_text.py", "[:spec.first_words]",
         "[:spec.first_words + 1]", "test_training_rows_are_processed_with_the_evaluation_keys"),
        ("blank_is_empty", "data/chat_text.py", "return not cell.strip()", "return not cell",
         "test_blank_and_equal_prompts_are_counted"),
        ("longest_length_never_drawn", "data/prompt_set.py", "integers(shortest, most + 1, ",
         "integers(shortest, most, ", "test_length_sampler_keeps_the_first_tokens"),
        ("bos_cut_off", "data/prompt_set.py", "else min(fixed, room)", "else 0", "test_truncation"),
        ("end_behind_the_prompt", "data/prompt_set.py", "behind = behind if whole else []",
         "behind = list(behind)", "test_the_tokenizers_bos_is_kept_and_its_eos_left_out")),
)

SUPERVISED = (
    *noticed_by(
        "unit/test_reward_model_task.py",
        ("margin_added", "supervised/reward_model_task.py", "rejected - margins)",
         "rejected + margins)", "test_the_loss_and_the_calibration_by_hand"),
        ("scores_not_centred", "supervised/reward_model_task.py", "(chosen + rejected) ** 2",
         "(chosen - rejected) ** 2", "test_the_loss_and_the_calibration_by_hand"),
        ("sureness_not_compared", "supervised/reward_model_task.py",
         "index_add_(0, bins, right - sure)", "index_add_(0, bins, right)",
         "test_the_loss_and_the_calibration_by_hand"),
        ("tie_is_wrong", "supervised/reward_model_task.py", "(margins.sign() + 1) / 2",
         "(margins > 0).float()",
         "test_swapped_pairs_give_one_less_the_accuracy_and_a_tie_is_one_half")),
    *noticed_by(
        "unit/test_sft_task.py",
        ("noise_of_the_place", "supervised/sft_task.py", "default_rng([self.cfg.seed, number])",
         "default_rng([self.cfg.seed, i])",
         "test_noise_is_of_the_seed_the_example_and_the_epoch_alone"),
        ("noise_without_length", "supervised/sft_task.py",
         "alpha / math.sqrt(length * output.shape[-1])", "alpha / math.sqrt(output.shape[-1])",
         "test_noise_is_of_the_seed_the_example_and_the_epoch_alone"),
        ("loss_of_an_example", "supervised/sft_task.py", "loss = nll / count",
         "loss = nll / len(measured)", "test_evaluation_is_the_oracles_whatever_the_passes"),
        ("data_shuffled_always", "supervised/supervised_task.py",
         "shuffle=self.cfg.data.shuffle", "shuffle=True",
         "test_the_order_is_drawn_once_an_epoch")),
)

ENVIRONMENTS = (
    *noticed_by(
        "unit/test_environments.py",
        ("first_turn_free", "environments/shipped.py", "TURN_COST * self.turns",
         "TURN_COST * (self.turns - 1)",
         "test_binary_search_takes_as_long_as_it_does_in_theory"),
        ("answers_swapped", "environments/shipped.py", "guess < self.number else",
         "guess > self.number else", "test_binary_search_takes_as_long_as_it_does_in_theory"),
        ("last_number_out_of_range", "environments/shipped.py", "1 <= guess <= self.limit",
         "1 <= guess < self.limit", "test_binary_search_takes_as_long_as_it_does_in_theory"),
        ("endless_expressions", "environments/shipped.py", "len(expression) > LONGEST",
         "len(expression) > 100 * LONGEST",
         "test_what_the_calculator_can_not_do_is_an_observation"),
        ("answer_ends_nothing", "environments/shipped.py", "Step(reward=right, done=True)",
         "Step(reward=right)", "test_any_other_turn_is_the_answer")),
    *noticed_by(
        "unit/test_environments.py",
        ("infinite_reward", "environments/env_calls.py",
         "not math.isfinite(reward) or abs(reward) > 3e38", "abs(reward) > math.inf",
         "test_what_it_may_not_be"),
        ("late_call_tried_again", "environments/env_calls.py",
         "if left and not isinstance(error, CallTimeoutError):", "if left:",
         "test_an_awaited_call_past_its_limit_is_one_episode_s_and_not_tried_again"),
        ("text_is_done", "environments/env_calls.py", "isinstance(result.done, str)",
         "isinstance(result.done, bytes)", "test_what_it_may_not_be")),
    *noticed_by(
        "unit/test_episodes.py",
        ("games_differ_in_a_group", "environments/env_calls.py",
         "call.episode // self.group_size, 0]", "call.episode, 0]",
         "test_a_group_plays_one_game_and_differs_in_what_follows")),
)

REWARDS = (
    *noticed_by(
        "unit/test_reward_rules.py",
        ("length_off", "rewards/rules.py", "abs(length - self.target) / self.target",
         "abs(length - self.target) / (self.target + 1)", "test_length"),
        ("parts_of_words", "rewards/rules.py", r"{re.escape(word)}(?!\w)", "{re.escape(word)}",
         "test_keyword"),
        ("neutral_words_count", "rewards/rules.py", "(good - bad) / (good + bad) if",
         "(good - bad) / len(words) if", "test_word_list"),
        ("first_number_counts", "rewards/rules.py", "Decimal(numbers[-1]", "Decimal(numbers[0]",
         "test_answer")),
    *noticed_by(
        "unit/test_reward_judge.py",
        ("score_out_of_range", "rewards/judge.py",
         "score is not None and self.low <= score <= self.high else", "score is not None else",
         "test_a_reply_without_a_score_in_range_is_asked_for_again"),
        ("same_reply_again", "rewards/judge.py", "1.0 if attempt else 0.0", "0.0",
         "test_a_reply_without_a_score_in_range_is_asked_for_again")),
    *noticed_by(
        "unit/test_reward_reading.py",
        ("tools_left_out", "rewards/scorers.py", "tools=tools, tokenize=False", "tokenize=False",
         "test_tools_are_rendered_as_in_training")),
    *noticed_by(
        "unit/test_reward_steps.py",
        ("sample_score_on_the_first_token", "rewards/scoring.py",
         "rows[i][-1] += part.weight * score", "rows[i][0] += part.weight * score",
         "test_rewards_of_steps_samples_and_tokens_are_summed_on_tokens")),
    *noticed_by(
        "unit/test_rewards_scoring.py",
        ("weights_forgotten", "rewards/scoring.py",
         "part.weight * np.where(is_number,", "np.where(is_number,",
         "test_several_rewards_are_weighted_and_none_does_not_apply"),
        ("one_none_is_invalid", "rewards/scoring.py", "applies |= is_number",
         "applies = is_number",
         "test_several_rewards_are_weighted_and_none_does_not_apply"),
        ("sum_overflows", "rewards/scoring.py", "abs(total) > score_checks.MAX_FLOAT32",
         "total != total", "test_a_sum_may_not_overflow_and_needs_a_token_to_land_on")),
)

DEFINITIONS = "test_logprobs_entropy_full_kl_and_gradients_are_those_of_their_definitions"
MODELS = (
    *noticed_by(
        "unit/test_logits.py",
        ("entropy_negative", "models/head.py", "return -log_p.exp().mul_(log_p).sum(-1)",
         "return log_p.exp().mul_(log_p).sum(-1)", DEFINITIONS),
        ("temperature_not_in_the_gradient", "models/head.py",
         "grad.div_(divisor)", "grad.div_(1.0)", DEFINITIONS),
        ("kl_of_the_other_side", "models/head.py", "log_ratio.mul_(log_p.exp_()).sum(-1)",
         "log_ratio.mul_((log_p - log_ratio).exp_()).sum(-1)", DEFINITIONS),
        ("gradient_without_the_target", "models/head.py",
         "grad.scatter_add_(-1, targets[part, None], upstream)", "", DEFINITIONS),
        ("cap_without_temperature", "models/head.py", "tanh_().mul_(cap / temperature)",
         "tanh_().mul_(cap)", DEFINITIONS)),
    *noticed_by(
        "unit/test_value_function.py",
        ("values_of_the_policy_s_adapter", "models/loading/load_adapters.py",
         "{**layer._modules, **cast(torch.nn.ModuleDict, parts)}", "{**layer._modules}",
         "test_a_value_adapter_is_one_of_peft_by_its_exported_names"),
        ("saved_part_misnamed", "models/loading/load_adapters.py",
         'if part not in ("default", *_OWN_PARTS)', 'if part != "default"',
         "test_a_value_adapter_is_one_of_peft_by_its_exported_names")),
    *noticed_by(
        "unit/test_token_budget.py",
        ("budget_ignored", "models/layout.py", "rows, tokens // max(int(lengths[order[start]]), 1)",
         "rows, tokens", "test_groups_hold_every_row_once_and_stay_in_the_budget"),
        ("row_in_two_passes", "models/layout.py", "start += size", "start += max(size - 1, 1)",
         "test_groups_hold_every_row_once_and_stay_in_the_budget")),
    *noticed_by(
        "unit/test_vocabulary.py",
        ("spare_rows_count", "models/head.py", "vocabulary.rows - vocabulary.size", "0",
         "test_ids_without_a_token_are_never_sampled_and_probabilities_are_of_the_others")),
)

DISTRIBUTED = (
    *noticed_by(
        "unit/test_threads.py",
        ("more_threads_than_cores", "distributed/torch_settings.py",
         "min(recorded, usable_cores())", "recorded", "test_what_decides_the_number"),
        ("omp_ignored", "distributed/torch_settings.py",
         'threads if os.environ.get("OMP_NUM_THREADS") else min(threads, usable_cores())',
         "min(threads, usable_cores())", "test_what_decides_the_number"),
        ("threads_spin", "distributed/torch_settings.py", '"OMP_WAIT_POLICY", "PASSIVE"',
         '"OMP_WAIT_POLICY", "ACTIVE"', "test_threads_of_the_command_wait_passively")),
    *noticed_by(
        "unit/test_launchers_read.py",
        ("number_of_the_host_lost", "distributed/launchers.py", 'r"\\1", first[0]',
         '"", first[0]', "test_the_first_host_of_slurm_s_short_form"),
        ("rank_beyond_the_world", "distributed/launchers.py", "if rank >= world or",
         "if rank > world or", "test_an_environment_that_makes_no_sense_is_refused"),
        ("one_task_is_a_rank", "distributed/launchers.py", '"SLURM_STEP_NUM_TASKS", 1) > 1',
         '"SLURM_STEP_NUM_TASKS", 1) > 0', "test_one_process_is_taken_for_one"),
        ("consequence_is_a_cause", "distributed/ranks.py", '("gloo", "Application',
         '("glooo", "Application', "test_a_rank_that_lost_another_lets_that_one_report_the_cause")),
    *noticed_by(
        "faults/test_fault_disk_and_memory.py",
        ("rows_shrink_by_one", "distributed/backend.py",
         "self.reduced[phase], key = rows // 2, self.keys[phase]",
         "self.reduced[phase], key = rows - 1, self.keys[phase]",
         "test_what_does_not_fit_is_made_anew_with_half_the_rows")),
)

EVALUATE = noticed_by(
    "unit/test_evaluation.py",
    ("best_of_n_biased", "evaluation/statistics.py", "math.comb(i - 1, n - 1) / total",
     "math.comb(i, n) / total", "test_best_of_n_is_the_mean_over_all_subsets"),
    ("kl_of_best_of_n_unbounded", "evaluation/statistics.py", "math.log(n) - (n - 1) / n",
     "math.log(n)", "test_kl_of_best_of_n"),
    ("samples_of_a_prompt_independent", "evaluation/statistics.py", "number if single else cluster",
     "number", "test_samples_of_one_prompt_do_not_count_as_independent"),
    ("tie_is_a_loss", "evaluation/statistics.py", "0.5 if gap == 0 else", "0.0 if gap == 0 else",
     "test_a_tie_is_half_a_win_and_unscored_pairs_are_left_out"),
    ("unscored_is_zero", "evaluation/statistics.py",
     'scores = [row["score"] for row in rows if row["score"] is not None]',
     'scores = [row["score"] or 0.0 for row in rows]',
     "test_figures_leave_out_what_has_no_score"),
    ("alike_is_certain", "evaluation/statistics.py", "column} <= {0.0, 1.0}:", "column} <= {2.0}:",
     "test_a_share_of_outcomes_that_are_all_alike_is_no_certainty"),
    ("worth_is_the_score", "evaluation/statistics.py", "zip(scores, values or scores, strict=True)",
     "zip(scores, scores, strict=True)",
     "test_what_is_best_by_one_reward_is_worth_what_another_says"),
    ("frontier_not_interpolated", "evaluation/statistics.py", "share = max(kl - left, 0.0)",
     "share = 0.0 * max(kl - left, 0.0)",
     "test_a_policy_is_compared_with_best_of_n_at_its_own_kl"),
)

LIVE = "unit/test_live_view.py"
PUBLISH = (
    *noticed_by(
        "unit/test_pictures.py",
        ("highest_thinned_away", "publish/curves.py", "kept += sorted(ends)",
         "kept += [min(ends, key=lambda point: point[1])]",
         "test_thinning_keeps_the_ends_and_every_outlier")),
    *noticed_by(
        "unit/test_trackers.py",
        ("steps_logged_twice", "publish/trackers.py", '(step := what.pop("step")) > last:',
         '(step := what.pop("step")) >= 0:',
         "test_a_tracker_of_one_s_own_gets_each_step_once")),
    *noticed_by(
        "integration/test_cli_plot.py",
        ("window_one_too_long", "publish/curves.py", "points[first][0] <= step - steps",
         "points[first][0] < step - steps", "test_smoothing_is_a_mean_over_steps")),
    *noticed_by(
        "integration/test_cli_compare.py",
        ("compared_one_step_earlier", "publish/curves.py",
         'int(row.get("episode") or 0) <= episodes]', 'int(row.get("episode") or 0) < episodes]',
         "test_figures_at_equal_samples_and_at_the_end")),
    *noticed_by(
        LIVE,
        ("late_step_takes_from_the_others", "publish/live_view.py",
         "min(self.clock() - self.step_begun, pace)", "self.clock() - self.step_begun",
         "test_the_remaining_time_is_told_from_the_last_steps"),
        ("pace_of_all_steps", "publish/live_view.py", "(*self.seconds, took)[-RECENT:]",
         "(*self.seconds, took)", "test_the_remaining_time_is_told_from_the_last_steps"),
        ("phase_begins_again", "publish/live_view.py",
         "since if text.startswith(name) else self.clock()", "self.clock()",
         "test_every_figure_is_in_its_line"),
        ("lines_wider_than_the_terminal", "publish/live_view.py",
         'line.truncate(width, overflow="ellipsis")', "line.truncate(10 * width)",
         "test_lines_fit_any_width")),
)

FOLLOWED = "integration/test_cli_watch.py"
CLI = (
    *noticed_by(
        FOLLOWED,
        ("rows_shown_again", "cli/follow.py", "self._show(rows[same:])", "self._show(rows)",
         "test_a_run_that_has_just_begun_is_waited_for_and_followed"),
        ("resume_unnoticed", "cli/follow.py", "same < len(before):", "False:",
         "test_a_resumed_run_repeats_nothing_that_stayed")),
    *noticed_by(
        "integration/test_cli_sweep_show.py",
        ("worst_job_first", "runs/sweeps.py", "in kind.lower_is_better else -best",
         "in kind.lower_is_better else best", "test_the_best_job_comes_first"),
        ("unevaluated_job_first", "cli/sweep_show.py", "math.inf if job.rank",
         "-math.inf if job.rank", "test_the_best_job_comes_first"),
        ("finished_jobs_run_again", "cli/sweep.py", 'if job.status != "finished"]', "]",
         "test_finished_jobs_are_kept_and_settings_apply_to_the_others")),
    *noticed_by(
        "integration/test_cli_terminal.py",
        ("lines_uncut", "cli/output.py", "len(line) <= width else", "len(line) <= 10 * width else",
         "test_lines_of_a_table_are_cut_to_the_width")),
    *noticed_by(
        "integration/test_cli_chat.py",
        ("dropped_turns_not_counted", "cli/chat.py", "self.dropped += 1", "self.dropped += 0",
         "test_the_oldest_turns_are_dropped_and_a_note_tells_once")),
    *noticed_by(
        "integration/test_cli_generate.py",
        ("escapes_reach_the_terminal", "cli/generate.py", "show_text(answer.text)",
         "put(answer.text)",
         "test_control_characters_reach_neither_terminal_nor_pipe")),
    *noticed_by(
        "integration/test_cli_completion.py",
        ("every_option_offered", "cli/options.py",
         "for option in options if option.startswith(last)]", "for option in options]",
         "test_words_are_completed")),
)

PROBLEMS, NAMED = "unit/test_config_problems.py", "test_each_problem_is_named"
CONFIG = (
    *noticed_by(
        PROBLEMS,
        ("wrong_value_named_twice", "config/problems.py",
         "if broken and not bad.intersection(names):", "if broken:",
         "test_a_wrong_value_is_not_also_a_contradiction"),
        ("two_lengths_allowed", "config/checks.py", "yield (len(lengths) > 1,",
         "yield (len(lengths) > 2,", NAMED),
        ("minibatch_beyond_the_rollout", "config/checks.py", "(values[key] or 0) > values[most]",
         "(values[key] or 0) > 1000 * values[most]", NAMED),
        ("any_value_goes_with", "config/checks.py", "values[other] in fitting if fitting else",
         "True if fitting else", NAMED)),
    *noticed_by(
        "unit/test_text.py",
        ("backslashes_counted_wrong", "config/text.py", "if len(backslashes) % 2 else letter)",
         "if len(backslashes) % 2 == 0 else letter)",
         "test_typed_texts_have_line_breaks_and_tabs")),
    *noticed_by(
        "unit/test_text.py",
        ("number_rounded", "config/text.py",
         'short if float(short := f"{value:g}") == value else repr(value)', 'f"{value:g}"',
         "test_a_number_is_shown_as_it_was_given")),
    *noticed_by(
        "unit/test_evaluation.py",
        ("ten_of_ten_is_certain", "config/text.py", "return max(error, 0.5 / (count + 1))",
         "return error", "test_a_share_of_outcomes_that_are_all_alike_is_no_certainty")),
    *noticed_by(
        "faults/test_fault_checkpoints.py",
        ("changed_by_hand", "config/resume_policy.py",
         "if all(differ) and kept and not accept_changes:", "if not kept:",
         "test_a_config_changed_by_hand_is_refused_by_name_or_accepted")),
)

NAMES = "integration/test_cli_run_names.py"
LAUNCH = (
    *noticed_by(
        "unit/test_local_ranks.py",
        ("hung_taken_for_killed", "launch/local_ranks.py", " and rank not in local.hung", "",
         "test_a_silent_rank_is_named_not_those_that_waited_for_it"),
        ("consequence_before_cause", "launch/local_ranks.py", "if not outcome.lost), None)",
         "if outcome), None)",
         "test_an_unexpected_error_keeps_its_traceback_and_comes_before_its_consequences")),
    *noticed_by(
        "unit/test_ready_tasks.py",
        ("library_of_environments_unnoticed", "launch/input_checks.py",
         '(*schema.rewards_of(cfg.reward), ("env", cfg.env.fn, {}))',
         "schema.rewards_of(cfg.reward)",
         "test_every_library_that_is_missing_is_named_with_its_extra")),
    *noticed_by(
        "integration/test_cli_launch.py",
        ("folder_shared", "runs/run_folder.py", "folder.mkdir()\n                return folder",
         "folder.mkdir(exist_ok=True)\n                return folder",
         "test_runs_of_one_second_get_folders_of_their_own"),
        ("auto_never_goes_on", "launch/open_run_folder.py", "if goes_on_with(named):", "if False:",
         "test_auto_starts_afresh_or_goes_on"),
        ("full_folder_taken", "launch/open_run_folder.py",
         "    if not _made_nothing(run_dir):\n        go_on", "    if False:\n        go_on",
         "test_a_folder_that_holds_something_is_refused_with_both_remedies")),
    *noticed_by(
        NAMES,
        ("running_run_taken", "launch/open_run_folder.py",
         "if owner is not None and owner.pid != os.getpid():", "if False:",
         "test_a_run_that_is_going_on_is_named_with_its_process")),
    *noticed_by(
        "integration/test_cli_validate.py",
        ("any_key_changes_on_resume", "launch/open_run_folder.py",
         'if resume_policy.classify_change(key) == "refused"', "if not key",
         "test_resuming_is_compared_with_the_run"),
        ("flat_scores_unnoticed", "launch/preflight.py", "equal = len(scores) > 1 and",
         "equal = len(scores) > 9 and", "test_notes_on_what_nothing_can_be_learnt_from"),
        ("any_gradient_is_zero", "launch/preflight.py", 'terms["grad_norm"] < 1e-7',
         'terms["grad_norm"] < 1e7', "test_notes_on_what_nothing_can_be_learnt_from")),
)

MUTANTS = (*ENGINE, *MORE_OF_THE_ENGINE, *STORAGE, *DATA, *SUPERVISED, *ENVIRONMENTS, *REWARDS,
           *MODELS, *DISTRIBUTED, *EVALUATE, *PUBLISH, *CLI, *CONFIG, *LAUNCH)
