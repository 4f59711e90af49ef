"""Supervised fine-tuning as a task: the negative logprob of what a text or a completion says."""

import logging
import math
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from ppocli.config import tasks
from ppocli.data.data_set import Examples, PromptSet
from ppocli.distributed.ranks import StopFlag, interleave
from ppocli.errors import ConfigError
from ppocli.models import layout, trunk
from ppocli.models.loading import language_model, model_config
from ppocli.models.loading.tokenizer import load_tokenizer
from ppocli.sampling.sampler import GenerationModel, SamplerSetup, sample_chunks
from ppocli.sampling.samples import EVALUATION, Samples, decode_responses
from ppocli.supervised import supervised_task
from ppocli.training import build_models, task
from ppocli.training.state import TrainState

log = logging.getLogger("ppocli")

_LOOKED_AT = 1000
"""examples whose ends are compared with what ends a response"""


class SFTTask(supervised_task.SupervisedTask):
    """The mean negative logprob of the trained tokens of an update, each token with the same
    weight, whatever micro-batch or rank it is in."""

    lower_is_better = tasks.KINDS["sft"].lower_is_better

    def __init__(self, setup: task.TaskSetup, tokenizer: Any, loaded: language_model.LoadedLM,
                 train: Examples, val: Examples | None) -> None:
        cfg, backend = setup.cfg, setup.backend
        self.policy = build_models.build_policy(cfg, backend, loaded, tokenizer)
        super().__init__(setup, tokenizer, self.policy, train, val)
        self.loaded = loaded
        self.spec, self.eval_spec = build_models.sampling_specs(cfg.generation, tokenizer, loaded)
        self.saved = build_models.saved_policy(loaded, self.spec, tokenizer)
        self.sampler = build_models.build_sampler(SamplerSetup(cfg, backend, tokenizer, loaded))
        self.shown_prompts = self._shown_prompts()
        self._check_end(tokenizer, train)

    def _check_end(self, tokenizer: Any, train: Examples) -> None:
        """Warn where examples teach to end with a token at which nothing would stop."""
        ends = Counter(int(ids[mask][-1]) for ids, mask in
                       islice(zip(train.tokens, train.trained, strict=True), _LOOKED_AT))
        (token, count), = ends.most_common(1)
        marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        generation = self.cfg.generation
        if (2 * count > ends.total() and token in marks - {*self.spec.stop_ids}
                and not self.spec.stop_sequences and not generation.ignore_eos):
            stops = ",".join(map(str, [*generation.stop_token_ids, token]))
            log.warning("The examples end with %s, at which responses would not stop: give "
                        "generation.stop_token_ids=[%s], here and in the PPO that follows.",
                        tokenizer.convert_ids_to_tokens(token), stops)

    def _shown_prompts(self) -> list[int]:
        """Places in ``val`` of the prompts that evaluations show responses to: the first that leave
        room for one."""
        limit, new = model_config.max_positions(self.loaded.lm), self.eval_spec.max_new_tokens
        pair = trunk.has_encoder(self.loaded.lm)  # which has that many positions on either side
        room = 2**31 if limit is None else limit * (new < limit) if pair else limit - new
        prompts = [] if self.val is None else [
            i for i, text in enumerate(self.val.prompts) if text][:self.cfg.sft.eval_samples]
        places = [i for i in prompts if len(self.val.prompt_tokens(i)) <= room]
        if len(places) < len(prompts):
            log.warning("%d of the first %d prompts of data.val leave no room for a response of "
                        "generation.max_new_tokens=%d: evaluations don't show them.",
                        len(prompts) - len(places), len(prompts), new)
        return places

    def sequences(self, data: Examples, rows: torch.Tensor) -> layout.Sequences:
        """Some examples as a forward pass reads them; what is trained on are their actions."""
        return supervised_task.sequences_of(data, rows, self.loaded.decoder_start)

    def plan(self, state: TrainState, batch: list[int]) -> task.Plan:
        """As :class:`Task`; the rows with the run's number of the first of them."""
        plan = super().plan(state, batch)
        return replace(plan, atoms=(plan.atoms, state.episodes))

    def loss(self, atoms: tuple[Examples, int], rows: torch.Tensor, weights: torch.Tensor,
             group: task.UpdateGroup) -> task.LossTerms:
        """As :class:`Task`."""
        data, first = atoms
        samples = self.sequences(data, rows)
        with self._noise(samples, first + rows):
            total, tokens = supervised_task.weighted_nll(self.trained.engine, samples, weights,
                                                    self.backend.device, pack=self.packs,
                                                    all_rows=True)
        return task.LossTerms(total, total.detach().reshape(1), tokens)

    def _noise(self, samples: layout.Sequences, numbers: torch.Tensor
               ) -> AbstractContextManager[Any]:
        """A context in which embeddings carry uniform noise of up to alpha / sqrt(T * D), T being
        an example's own tokens (NEFTune, Jain et al. 2023, arXiv 2310.05914). It is a function of
        the seed, the example and the epoch alone: of its number in the run, in ``numbers``."""
        if (alpha := self.cfg.sft.neftune) is None:
            return nullcontext()

        def add(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            noise = torch.zeros(output.shape)
            for i, (number, length) in enumerate(zip(numbers.tolist(), samples.lengths.tolist(),
                                                     strict=True)):
                values = np.random.default_rng([self.cfg.seed, number]).uniform(
                    -1.0, 1.0, (length, output.shape[-1]))
                most = alpha / math.sqrt(length * output.shape[-1])
                noise[i, :length] = torch.from_numpy(values * most)[:output.shape[1]]
            return output + noise.to(output)

        return self.loaded.lm.get_input_embeddings().register_forward_hook(add)

    def evaluate(self, context: task.StepContext) -> task.Evaluation:
        """As :class:`Task`: the loss of ``data.val``, and responses to a few of its prompts."""
        with self.sampler.acting(self.policy) as acting:
            self._acting = acting
            return super().evaluate(context)

    def measure(self, data: Examples, rows: torch.Tensor) -> torch.Tensor:
        """As :class:`SupervisedTask`: sum of the negative logprobs, and how many tokens."""
        samples = self.sequences(data, rows)
        batch = layout.lay_out(samples, pack=self.packs).to(self.backend.device)
        out = self._acting(batch, temperature=1.0, all_rows=True)
        count = samples.mask.sum(1)
        row = torch.repeat_interleave(torch.arange(len(rows)), count)
        sums = torch.zeros(len(rows), dtype=torch.float64)
        sums.index_add_(0, row, -out.logprobs.double().cpu())
        return torch.stack([sums, count.double()], dim=1)

    def evaluation_figures(self, measured: torch.Tensor) -> dict[str, float]:
        """As :class:`SupervisedTask`."""
        nll, count = measured.sum(0).tolist()
        loss = nll / count
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": count}

    def shown(self, measured: torch.Tensor, stop: StopFlag) -> list[dict[str, Any]]:
        """As :class:`SupervisedTask`: responses to the first prompts of ``data.val``."""
        if not self.shown_prompts:
            return []
        places, num_local = self.backend.ranks.share(self.shown_prompts)
        tokens = [self.val.prompt_tokens(i) for i in places]
        batch = PromptSet(tokens, [self.val.prompts[i] for i in places], {}, ()).batch(
            range(len(places)), places, self.tokenizer.pad_token_id)
        out = Samples.joined(list(sample_chunks(
            self.sampler, self.passes, batch, self.eval_spec, EVALUATION,
            GenerationModel(self._acting.lm), stop, phase="evaluation", chunk=len(batch))))
        before = tokens if self.loaded.decoder_start is None else [list[int]() for _ in tokens]
        texts = decode_responses(self.tokenizer, before, out.action_ids, self.eval_spec)
        rows = [{"prompt": text, "response": response, "score": None, "kl": None,
                 "response_tokens": int(count), "finished": bool(ended)}
                for text, response, count, ended in zip(
                    batch.texts, texts, out.mask.sum(1).tolist(), out.finished.tolist(),
                    strict=True)][:num_local]
        return interleave(self.backend.ranks.gather(rows))


def build_task(setup: task.TaskSetup) -> SFTTask:
    """The task of ``ppocli sft``.

    Raises:
        ConfigError, InputError: each naming the key and the fix.
    """
    cfg = setup.cfg
    tokenizer, unloaded = load_tokenizer(cfg.model), model_config.read_lm(cfg.model)
    if cfg.sft.neftune is not None and trunk.has_encoder(unloaded):
        raise ConfigError("NEFTune's noise is for models that read one text, not for an "
                          "encoder-decoder.", where="sft.neftune", fix="leave it out")
    loaded, train, val = supervised_task.load(setup, tokenizer, unloaded)
    build_models.note_wording(tokenizer, train.chat)
    return SFTTask(setup, tokenizer, loaded, train, val)
