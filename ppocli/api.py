"""ppocli from Python: ``ppocli.train([...])`` with words as on the command line and Python objects.

The same composition, launch and engine as the command; nothing is implemented twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppocli.errors import ConfigError, InputError

if TYPE_CHECKING:
    from ppocli.models.loading import LoadedLM


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: where it lies, what came out, and its policy."""

    run_dir: Path
    model_dir: Path
    """a plain Hugging Face folder"""
    summary: dict[str, Any]
    """the contents of summary.json"""

    @cached_property
    def _model(self) -> tuple[LoadedLM, Any]:
        from ppocli.config.schema import ModelConfig
        from ppocli.models.loading import load_causal_lm, load_tokenizer

        cfg = ModelConfig(path=str(self.model_dir))
        return load_causal_lm(cfg), load_tokenizer(cfg)

    def generate(self, prompts: Sequence[str], *, seed: int = 0, **sampling: Any) -> list[str]:
        """One response for each prompt, sampled as in training.

        Args:
            prompts: texts.
            seed: of the sampling; equal seeds give equal responses.
            sampling: overrides: max_new_tokens, min_new_tokens, temperature, top_k, top_p,
                do_sample, stop_sequences.

        Raises:
            ConfigError: an unknown override, or no prompts.
        """
        from ppocli.config.problems import find_problems, raise_problems
        from ppocli.config.resolved import read_config
        from ppocli.models.loading import stop_rules
        from ppocli.models.prompting import generate_texts
        from ppocli.models.sampling import SAMPLING_KEYS, SamplingSpec

        loaded, tokenizer = self._model
        cfg = read_config(self.run_dir / "config.yaml")
        allowed = (*SAMPLING_KEYS, "stop_sequences")
        unknown = sorted(set(sampling) - set(allowed))
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no sampling setting.",
                              fix=f"one of {', '.join(allowed)}")
        generation = replace(cfg.generation, **sampling)
        raise_problems([problem for problem in find_problems(replace(cfg, generation=generation))
                        if problem.key.startswith("generation.")])
        stop_ids, stops = stop_rules(tokenizer, loaded, generation.stop_token_ids,
                                     list(generation.stop_sequences))
        spec = SamplingSpec(stop_ids=stop_ids, stop_sequences=stops,
                            **{name: getattr(generation, name) for name in SAMPLING_KEYS})
        return generate_texts(loaded.lm, tokenizer, list(prompts), spec, seed=seed)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Copy the trained model's folder to ``folder``, which must not exist or be empty.

        Raises:
            ConfigError: the folder holds something.
        """
        import shutil

        target = Path(folder)
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{target} exists already and isn't empty; nothing is overwritten.",
                              fix="name another folder")
        shutil.copytree(self.model_dir, target, dirs_exist_ok=True)
        return target


def train(overrides: Sequence[str] = (), *,
          reward_fn: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None,
          metric_fn: Callable[..., Any] | None = None, prompts: Sequence[Any] | None = None,
          eval_prompts: Sequence[Any] | None = None, stop_sequences: Sequence[str] | None = None
          ) -> TrainedRun:
    """Train a policy in this process, as ``ppocli train`` does.

    Args:
        overrides: words of the command line, e.g. ``["+recipe=quickstart", "seed=1"]``.
        reward_fn: in place of ``reward.fn``: a callable, or several by name (each of weight 1).
        metric_fn: in place of ``reward.metric_fn``.
        prompts, eval_prompts: in place of the ``prompts`` section's sources: texts, or mappings
            with a ``prompt`` and metadata.
        stop_sequences: in place of ``generation.stop_sequences``.

    Raises:
        PpocliError: whatever ended the run; its checkpoints are kept.
    """
    from ppocli.config.compose import compose
    from ppocli.config.problems import find_problems, raise_problems
    from ppocli.engine.session import PythonObjects
    from ppocli.launch import launch

    given = {"reward.fn": reward_fn, "reward.metric_fn": metric_fn, "prompts.items": prompts,
             "prompts.eval.items": eval_prompts}
    handed_in = frozenset(key for key, value in given.items() if value is not None)
    composition = compose(list(overrides), handed_in=handed_in)
    if composition is None:
        raise ConfigError("These words only print a configuration.", fix="leave out --cfg, --info")
    config = composition.config
    if stop_sequences is not None:
        if isinstance(stop_sequences, str):
            raise ConfigError("stop_sequences is one text, not several.",
                              where="ppocli.train(stop_sequences=...)",
                              fix=f"stop_sequences=[{stop_sequences!r}]")
        config = replace(config, generation=replace(config.generation,
                                                    stop_sequences=list(stop_sequences)))
        raise_problems(find_problems(config, handed_in=handed_in))
    objects = PythonObjects(
        reward_fn=reward_fn, metric_fn=metric_fn,
        prompts=None if prompts is None else list(prompts),
        eval_prompts=None if eval_prompts is None else list(eval_prompts))
    outcome = launch(config, objects=objects if handed_in else None,
                     resume_from=composition.resume_from, name_hint=composition.recipe or "run")
    return load_run(outcome.run_dir)


def load_run(run_dir: str | Path) -> TrainedRun:
    """Open a finished run's folder.

    Raises:
        InputError: it holds no finished run.
    """
    folder = Path(run_dir).resolve()
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} holds no summary.json of a run.", where=str(folder),
                         fix="name the folder of a finished run") from error
    if summary.get("status") != "finished":
        raise InputError(f"The run in {folder} is {summary.get('status')}, not finished.",
                         where=str(folder), fix=f"ppocli resume {folder}")
    return TrainedRun(folder, folder / "model", summary)
