"""What is known about an exported policy: read from its run's folder, without secrets."""

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ppocli.builtin.names import BUILTIN_PREFIX
from ppocli.config import config_yaml, schema, secrets
from ppocli.evaluation.eval_request import read_result
from ppocli.runs import hub
from ppocli.runs.model_files import trained_with_template
from ppocli.runs.record import RunRecord, eval_samples, first_of_each_prompt, read_run
from ppocli.runs.target import Target

_NUM_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a card says about a policy; all but ``name`` is empty for a model of no run."""

    name: str
    step: int | None = None
    run: RunRecord | None = None
    license: dict[str, str] = field(default_factory=dict)
    """of the starting model: ``license``, ``license_name``, ``license_link``; empty if unknown"""
    before: dict[str, float] = field(default_factory=dict)
    """figures of the evaluation before training"""
    after: dict[str, float] = field(default_factory=dict)
    """figures of the evaluation of the exported weights"""
    evaluation: dict[str, Any] | None = None
    """the newest eval.json of these weights under the run's own settings"""
    samples: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    """rows of samples.jsonl: responses to the same prompt before training and after"""

    @property
    def config(self) -> schema.TrainConfig | None:
        """How the policy was trained."""
        return None if self.run is None else self.run.config


def provenance_of(target: Target) -> Provenance:
    """Read a target's run. The Hub is asked for the license of a starting model from there."""
    if target.run_dir is None:
        return Provenance(target.label)
    run, step = read_run(target.run_dir), target.step or 0
    before, after = (
        {name.removeprefix("eval/"): float(value) for row in run.rows if row["step"] == number
         for name, value in row.items() if name.startswith("eval/") and value is not None}
        for number in (0, step))
    old, new = map(first_of_each_prompt, eval_samples(run.folder, 0, step))
    samples = [(old[prompt], new[prompt]) for prompt in old
               if step > 0 and "response" in new.get(prompt, ())]  # reward models write none
    return Provenance(
        run.name, target.step, run, license_of(run.config.model.path, run.config.model.revision),
        before, after, run_evaluation(target, run), samples[:_NUM_SAMPLES])


def license_of(model: str, revision: str | None) -> dict[str, str]:
    """The license in the README.md of ``model.path``; empty where it names none or isn't there."""
    if model.startswith(BUILTIN_PREFIX):  # under the same license as ppocli
        return {"license": "apache-2.0"}
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    with suppress(Exception):  # a missing or broken card is no reason not to export
        path = Path(model).expanduser() / "README.md" if hub_name(model) is None else \
            hf_hub_download(model, "README.md", revision=revision,
                            local_files_only=not hub.hub_reachable())
        card = metadata_load(path) or {}
        return {key: card[key] for key in ("license", "license_name", "license_link")
                if isinstance(card.get(key), str)}
    return {}


def hub_name(path: str | None) -> str | None:
    """``path`` of a run's configuration if it is a Hub name; None for folders, which are absolute
    there, lists, addresses, built-ins and Python objects."""
    if path == config_yaml.PYTHON_OBJECT or "://" in (path or "") or (
            path or "/").startswith((".", "/", "~", "{", BUILTIN_PREFIX)):
        return None
    return path


def run_evaluation(target: Target, run: RunRecord) -> dict[str, Any] | None:
    """The newest ``eval/*/eval.json`` of exactly these weights under the run's own reward, prompts
    and sampling, with any seed and number of responses; None if there is none. Weights are loaded,
    for their digest, only if an evaluation has the right settings."""
    config = json.loads(json.dumps(asdict(run.config), default=str))
    config["model"] = {key: config["model"][key] for key in ("path", "revision", "tokenizer_path")}
    if (chat := run.config.prompts.chat) is None:  # as the model was trained
        chat = trained_with_template(target.model)
    config["prompts"]["chat"], results = bool(chat), []
    for path in run.folder.path.glob("eval/*/eval.json"):
        result = read_result(path.parent) or {}
        parts = {name: (result.get("settings") or {}).get(name) or {}
                 for name in ("reward", "prompts", "model")}
        parts["model"] = {key: parts["model"].get(key) for key in config["model"]}
        if (result.get("step") == target.step and _agrees(parts, config)
                and config_yaml.PYTHON_OBJECT not in json.dumps(parts)):
            results.append(result)
    digest, sampling = _digest_and_sampling(target, run.config) if results else ("", {})
    return max((result for result in results if result["model"].get("digest") == digest
                and result.get("generation") == sampling),
               key=lambda result: str(result["time"].get("finished")), default=None)


def _agrees(recorded: Any, configured: Any) -> bool:
    """Whether recorded settings are the configured ones, but for the number of responses."""
    if not isinstance(recorded, dict) or not isinstance(configured, dict):
        return bool(recorded == configured)
    return all(_agrees(value, configured.get(key)) for key, value in recorded.items()
               if key not in ("digest", "count", "repeat"))


def _digest_and_sampling(target: Target, config: schema.TrainConfig) -> tuple[str, dict[str, Any]]:
    """Digest of the target's weights and the run's sampling at evaluation, as in eval.json."""
    from ppocli.models.loading import language_model, load_adapters, model_config
    from ppocli.models.loading.tokenizer import load_tokenizer
    from ppocli.models.trunk import Vocabulary, set_vocabulary
    from ppocli.training.build_models import sampling_specs

    policy = model_config.policy_config(config.model, target.model)
    loaded, tokenizer = language_model.load_lm(policy), load_tokenizer(policy)
    set_vocabulary(loaded.lm, Vocabulary.of(tokenizer, loaded.lm))
    spec = sampling_specs(config.generation, tokenizer, loaded)[1]
    digest = load_adapters.tensors_digest(loaded.lm.state_dict())
    return digest, json.loads(json.dumps(asdict(spec)))


def masked(text: str) -> str:
    """``text`` with secrets of the environment, the token of ``hf auth login``, texts shaped like
    tokens and passwords in URLs replaced by ``***``, and the home folder by ``~``."""
    from huggingface_hub import get_token

    hidden = {*secrets.secret_values(frozenset(os.environ.items())), *secrets.SENT,
              *filter(None, [get_token()])}
    text, home = secrets.without_secrets(text, hidden), os.path.expanduser("~")
    for folder in {home, os.path.realpath(home)} - {"~", "/", os.path.realpath("~")}:
        text = re.sub(re.escape(folder) + r"(?![\w.-])", "~", text)
    return text
