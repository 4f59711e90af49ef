"""Samples from vLLM servers that are given the policy's weights whenever these have changed."""

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ppocli.config import schema
from ppocli.config.text import format_memory
from ppocli.data.data_set import PromptBatch
from ppocli.distributed.backend import Backend
from ppocli.distributed.host_memory import room_here
from ppocli.distributed.ranks import StopFlag
from ppocli.errors import SamplerError
from ppocli.models.head import vocabulary_of
from ppocli.models.layout import padded
from ppocli.models.loading.language_model import DTYPES
from ppocli.models.loading.load_adapters import adapter_tensors, tensors_digest, write_adapter
from ppocli.models.loading.model_config import ModelFacts, max_positions
from ppocli.models.policy import Policy
from ppocli.runs.daemon import in_daemon
from ppocli.sampling.conversation import Conversation
from ppocli.sampling.sampler import (
    BegunSamples,
    DecodeSampler,
    GenerationModel,
    SamplerSetup,
    check_stop,
)
from ppocli.sampling.samples import (
    Generation,
    Samples,
    SamplingSpec,
    TokenRows,
    lengths,
    single_turn,
    uniform,
)
from ppocli.sampling.vllm import server_process
from ppocli.sampling.vllm.server import HOW_TO, Answer, Dealing, Server, WeightsFolder, tensors_of

log = logging.getLogger("ppocli")

PROBE, PROBED = 8, 16
"""tokens of the prompt whose greedy continuation is compared with ours, and of that"""
MOST_OFF, MOST_OFF_QUANTIZED = {"fp32": 0.01, "bf16": 0.5}, 1.0
"""nats that a logprob of the probe may be off on average; other weights are off by several"""


class VllmSampler(DecodeSampler):
    """Responses of vLLM servers."""

    repeatable = False

    def __init__(self, setup: SamplerSetup) -> None:
        super().__init__(setup)
        cfg, ranks = setup.cfg, setup.backend.ranks
        server_process.check_servable(cfg, setup.loaded.lm)
        self.logprobs_match = False
        config = setup.loaded.export_config
        self.name = server_process.served_name(cfg, config)
        self._adapter = None if server_process.lora_rank(cfg, config) is None else \
            setup.loaded.adapter
        """the adapter, if servers get that by itself"""
        if self._adapter is not None:
            log.info("vLLM servers get the adapter by itself")
        elif setup.loaded.adapter is not None:
            log.info("vLLM servers get the adapter merged into its base: %s",
                     server_process.why_merged(cfg, config))
        self._vocabulary = vocabulary_of(setup.loaded.lm)
        self.servers = [Server(url, cfg.rollout, self._vocabulary) for url in cfg.rollout.urls]
        self.version = ""
        """of the weights that responses have to come from"""
        self._lm: Any = None
        self.ahead: BegunSamples | None = None
        self._run, self._sent, self._digest = secrets.token_hex(4), 0, ""
        self._slept = False
        self._weights: WeightsFolder | None = None
        ranks.first_does(self._begin)

    def _begin(self) -> None:
        if self.setup.cfg.rollout.launch:
            server_process.launch_servers(self, self.setup.cfg,
                                  ModelFacts(self.setup.loaded.export_config), self.servers)
        for server in self.servers:
            server.check(self.name, 0)

    @contextmanager
    def acting(self, policy: Policy) -> Iterator[Policy]:
        """As :class:`Sampler`: rank 0 gives the servers the weights, if they have others."""
        with super().acting(policy) as acting:
            ranks = self.setup.backend.ranks
            if ranks.first_does(lambda: self._changed(acting.lm)) and self.ahead is not None:
                ranks.all_do(self.ahead.settle, "rollout")
            if self.setup.cfg.rollout.sleep:
                torch.cuda.empty_cache()  # what torch holds in reserve is no room for servers
            self.version = ranks.first_does(lambda: self._update(acting.lm))
            self._lm = acting.lm
            try:
                yield acting
            finally:
                self._lm = None
            if self.setup.cfg.rollout.sleep:
                ranks.gather(None)  # all have their samples
                ranks.first_does(self._put_to_sleep)

    def _changed(self, lm: Any) -> bool:
        """Whether the policy has other weights than the last ones that were sent; they are held
        for servers in any case."""
        cfg, adapter = self.setup.cfg, self._adapter
        tensors = adapter_tensors(adapter) if adapter is not None else tensors_of(
            lm, self.setup.loaded.adapter, DTYPES[cfg.hardware.precision])
        changed = (digest := tensors_digest(tensors)) != self._digest
        self._digest, self._sent = digest, self._sent + changed
        self._weights = self._weights or WeightsFolder(cfg.rollout.weights_dir)
        self._weights.write(partial(lm.save_pretrained, state_dict=tensors) if adapter is None else
                            partial(write_adapter, adapter, tensors), self._newest)
        return changed

    @property
    def _newest(self) -> str:
        return f"{self._run}-{self._sent}"

    def _model(self, version: str) -> str | None:
        """The adapter that requests name."""
        return None if self._adapter is None else version

    def _update(self, lm: Any) -> str:
        """The version that servers have from now on.

        Raises:
            SamplerError: one is lost, or says other tokens than we do.
        """
        version, weights, sleeps = self._newest, self._weights, self.setup.cfg.rollout.sleep
        assert weights is not None
        for server in self.servers if sleeps else ():
            server.wake(None if self._adapter is not None else "weights")
        dropped = sleeps and self._adapter is None
        todo = [one for one in self.servers if dropped or not one.holds(version)]
        begun = [in_daemon(partial(self._give, one, weights), f"updating {one.url}")
                 for one in todo]
        for server, future in zip(todo, begun, strict=True):
            future.result()
            self._probe(server, lm)
        return version

    def _give(self, server: Server, weights: WeightsFolder) -> None:
        server.check(self.name, 0)
        if self._adapter is None:
            weights.check_readable(server)
        send = weights.load if self._adapter is None else weights.load_adapter

        def give() -> None:
            send(server)
            if self.setup.cfg.rollout.sleep:
                server.wake("kv_cache")

        server.load(give, self._newest)

    def _put_to_sleep(self) -> None:
        """Have servers give their memory back; the first time, log what came of it."""
        device = self.setup.backend.device
        before = room_here(cuda=device.type == "cuda", device=device)
        # an adapter is sent without its base, which has to stay
        asleep = [server.sleep(1 if self._adapter is not None else 2) for server in self.servers]
        if self._slept:
            return
        self._slept = True
        if not all(asleep):
            log.warning("%s was told to sleep, and says that it doesn't (/is_sleeping).",
                        self.servers[asleep.index(False)].url)
        elif before.device is None:
            log.warning("rollout.sleep does nothing here: vLLM on a CPU says that it sleeps, and "
                        "keeps its memory.")
        else:
            room = room_here(cuda=True, device=device)
            log.info("asleep, the servers give back %s of %s",
                     format_memory(max((room.device or 0) - before.device, 0)), room.name)

    @torch.no_grad()
    def _probe(self, server: Server, lm: Any) -> None:
        """Compare a greedy continuation with what the policy says of it.

        Raises:
            SamplerError: they differ.
        """
        room = max_positions(lm) or 2**31
        ids = [(17 * i + 5) % self._vocabulary.size for i in range(min(PROBE, room // 2))]
        answer = server.generate(ids, {"temperature": 0.0, "ignore_eos": True, "detokenize": False,
                                       "max_tokens": min(PROBED, room - len(ids))},
                                 self._model(self._newest))
        with self.setup.backend.autocast():
            tokens = torch.tensor([ids + answer.ids[:-1]], device=self.setup.backend.device)
            logits = lm(input_ids=tokens, use_cache=False).logits[0, len(ids) - 1:].float()
        gaps = self._vocabulary.gaps_on(logits.device) if self._vocabulary.gaps else None
        ours = self._vocabulary.cut(logits, gaps).log_softmax(-1).cpu()
        logprobs = ours.gather(-1, torch.tensor(answer.ids)[:, None]).squeeze(-1)
        off = (logprobs - torch.tensor(answer.logprobs)).abs() + ours.amax(-1) - logprobs
        cfg = self.setup.cfg
        most = MOST_OFF_QUANTIZED if cfg.model.quantization else MOST_OFF[cfg.hardware.precision]
        if not float(off.mean()) <= most:
            raise SamplerError(
                f"{server.url} says other tokens than the policy whose weights it was given: its "
                f"greedy logprobs are off by {float(off.mean()):.3g} nats on average.",
                where="rollout.urls", fix=f"{HOW_TO}: output embeddings that aren't weights of "
                "their own stay the old ones there")

    def sample(self, prompts: PromptBatch, spec: SamplingSpec, stream: int, model: GenerationModel,
               stop: StopFlag, *, at_once: int, chunk: int) -> Iterator[Samples]:
        """As :class:`Sampler`.

        Raises:
            SamplerError: a server is lost, or what one says makes no sense.
        """
        self._check_acting(model)
        begun = self.begin(prompts, spec, stream)
        with closing(begun.dealing):
            for start in range(0, len(prompts), chunk):
                yield begun.take(slice(start, start + chunk),
                                 partial(check_stop, stop, len(prompts)))

    def begin(self, prompts: PromptBatch, spec: SamplingSpec, stream: int, *, ahead: bool = False
              ) -> "Begun":
        """Have one sample per prompt made with the weights that the servers have now.

        Args:
            ahead: they are taken later: weights that are sent before then wait for them.
        """
        rows = [row[mask].tolist() for row, mask in zip(prompts.tokens, prompts.mask, strict=True)]
        begun = Begun(prompts, self.deal(rows, sampling_params(
            spec, self.setup.cfg.seed, stream, prompts.episodes)))
        self.ahead = begun if ahead else self.ahead
        return begun

    @contextmanager
    def converse(self, contexts: TokenRows, episodes: Sequence[int], spec: SamplingSpec,
                 stream: int, model: GenerationModel, stop: StopFlag) -> Iterator[Conversation]:
        """As :class:`DecodeSampler`; a server reads what it has read before from its cache."""
        self._check_acting(model)
        yield self.turns(episodes, spec, stream, stop.check)

    def turns(self, episodes: Sequence[int], spec: SamplingSpec, stream: int,
              poll: Callable[[], None]) -> Conversation:
        """What servers say in the turns of these samples, as long as they have these weights.

        Args:
            poll: called every now and then; may raise to stop.
        """
        turns = Counter[int]()

        def answer(rows: Sequence[int], contexts: TokenRows, limits: Sequence[int]) -> Generation:
            params = [sampling_params(spec, self.setup.cfg.seed, stream, [episodes[row]],
                                      turn=turns[row], limits=[limit])[0]
                      for row, limit in zip(rows, limits, strict=True)]
            turns.update(rows)
            with closing(self.deal(contexts, params)) as dealing:
                return generation_of(dealing.take(range(len(contexts)), poll))

        return answer

    def _check_acting(self, model: GenerationModel) -> None:
        if model.lm is not self._lm:
            raise RuntimeError("servers have no weights of a policy outside of acting()")

    def answer(self, contexts: TokenRows, spec: SamplingSpec, seed: int, stream: int,
               episodes: Sequence[int], poll: Callable[[], None]) -> Generation:
        """One whole response to each of these ids.

        Args:
            poll: called every now and then; may raise to stop.

        Raises:
            SamplerError: a server is lost.
        """
        with closing(self.deal(contexts, sampling_params(spec, seed, stream, episodes))) as dealing:
            return generation_of(dealing.take(range(len(contexts)), poll))

    def deal(self, contexts: TokenRows, params: Sequence[Mapping[str, Any]]) -> Dealing:
        """Have the servers answer these ids with the weights that they have now.

        Args:
            params: of :func:`sampling_params`, a row's each.
        """
        version = self.version

        def ask(server: Server, row: int) -> Answer:
            answer = server.generate(contexts[row], params[row], self._model(version))
            if set(answer.versions) != {version}:
                raise SamplerError(
                    f"{server.url} has sampled with weights {' and '.join(answer.versions)} instead"
                    f" of {version}: it was started anew, or another run uses it.",
                    where="rollout.urls", fix="ppocli resume gives it the weights again")
            return answer

        return Dealing(self.servers, ask, len(contexts), self.setup.cfg.rollout.concurrency)


@dataclass(frozen=True, slots=True)
class Begun:
    """Samples that are being made."""

    prompts: PromptBatch
    dealing: Dealing

    def take(self, rows: slice, poll: Callable[[], None]) -> Samples:
        """Samples of these rows, once they are there.

        Raises:
            SamplerError: a server is lost, or what one says makes no sense.
        """
        prompts = self.prompts
        answers = self.dealing.take(range(len(prompts))[rows], poll)
        return single_turn(prompts.tokens[rows], prompts.mask[rows], generation_of(answers), None)

    def settle(self) -> None:
        """As :class:`BegunSamples`."""
        self.take(slice(None), lambda: None)


def check_engine(cfg: schema.TrainConfig, backend: Backend, facts: ModelFacts, longest_prompt: int
                 ) -> None:
    """Find out, before weights are loaded, that servers are missing or serve something else. All
    ranks call it in step.

    Raises:
        SamplerError: which, and how to start it.
        ConfigError: servers can't have such a model.
    """
    def check() -> None:
        server_process.check_servable(cfg, facts)
        name = server_process.served_name(cfg, facts.config)
        for url in cfg.rollout.urls:
            Server(url, cfg.rollout).check(name, server_process.most_tokens(cfg, longest_prompt))

    if cfg.rollout.engine == "vllm" and not cfg.rollout.launch:
        backend.ranks.first_does(check)


def sampling_params(spec: SamplingSpec, seed: int, stream: int, episodes: Sequence[int], *,
                    turn: int = 0, limits: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Fields of vLLM's ``SamplingParams`` for each sample; its seed is a function of the run's
    seed, the sample's number and the turn. Nothing ends a response but ``spec``'s own rules.

    Args:
        limits: most tokens of each response, in place of the spec's.
    """
    if limits is None:
        limits = [spec.max_new_tokens] * len(episodes) if spec.length_range is None else \
            lengths(seed, episodes, *spec.length_range).tolist()
    seeds = (uniform(seed, stream, episodes, turn + 1)[:, turn] * 2**53).astype("int64").tolist()
    common = {"temperature": spec.temperature if spec.do_sample else 0.0, "top_k": spec.top_k,
              "top_p": spec.top_p, "min_p": spec.min_p, "ignore_eos": True,
              "repetition_penalty": spec.repetition_penalty,
              "stop_token_ids": list(spec.stop_ids), "stop": list(spec.stop_sequences),
              "detokenize": bool(spec.stop_sequences)}
    return [{**common, "max_tokens": limit, "min_tokens": min(spec.min_new_tokens, limit),
             "seed": row_seed} for limit, row_seed in zip(limits, seeds, strict=True)]


def generation_of(answers: Sequence[Answer]) -> Generation:
    """Responses as decode loops return them."""
    mask = padded([[True] * len(one.ids) for one in answers], torch.bool)
    return Generation(padded([one.ids for one in answers]), mask,
                      padded([one.logprobs for one in answers], torch.float32),
                      torch.zeros(mask.shape), torch.tensor([one.finished for one in answers]))
