"""Reward functions that misbehave: a run ends as if they had not, or with exit code 7 and their
name."""

import random
import shutil
from collections import Counter
from functools import cache
from pathlib import Path

import runs

from tools.soak.cases import ROOT  # first: it makes the tests' helpers importable

WORDS = ("ppo.num_steps=2", "ppo.num_rollouts=8", "prompts.eval.limit=2",
         "reward.fn=fuzzed.py:score",
         "reward.kwargs={}")

DEEDS = (
    # harmless to a run, however rude: its numbers stay
    "pass", "random.seed(3)", "np.random.seed(3)", "torch.manual_seed(3)", "os.chdir('/')",
    "print('x' * 5_000_000)", "sys.stderr.write('\\x1b[2J' * 9)", "warnings.warn('w' * 100_000)",
    "logging.basicConfig(level=10, force=True)", "logging.shutdown()", "gc.disable()",
    "os.environ.clear()", "os.environ.update(CUDA_VISIBLE_DEVICES='', RANK='7', WORLD_SIZE='9')",
    "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "threading.Thread(target=time.sleep, args=(600,)).start()",
    "subprocess.Popen(['sleep', '600'])",
    "sys.setrecursionlimit(150)", "sys.path.clear()",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "locale.setlocale(locale.LC_ALL, 'C')", "sys.excepthook = None",
    "torch.set_num_threads(2)", "torch.use_deterministic_algorithms(True)",
    "os.umask(0o777)", "completions.clear()", "completions.append('more')", "sys.stdout.close()",
    "columns.clear()", "time.sleep(0.5)", "open('/dev/null').detach()",
    "sys.modules.pop('json', None)", "json.dumps = None",
    # what leaves its trace unless somebody cleans up, or is refused
    "torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.bfloat16)",
    "torch.set_grad_enabled(False)", "torch.inference_mode().__enter__()",
    "torch.no_grad().__enter__()", "torch.set_default_device('meta')",
    "torch.autograd.set_detect_anomaly(True)", "torch.set_flush_denormal(True)",
    "torch.set_float32_matmul_precision('medium')", "torch.autocast('cpu').__enter__()",
    # ends
    "sys.exit()", "sys.exit(0)", "sys.exit(3)", "sys.exit('bye')", "raise SystemExit(None)",
    "raise KeyboardInterrupt", "raise GeneratorExit", "raise StopIteration",
    "raise MemoryError", "raise OSError(28, 'No space left on device')", "raise BrokenPipeError",
    "raise RecursionError", "raise ValueError('m' * 5_000_000)", "raise ValueError('\\x1b[2J')",
    "raise Silent", "raise Nested from Silent()", "raise BaseException('base')", "assert False",
    "raise ExceptionGroup('g', [ValueError(1)])", "raise torch.OutOfMemoryError('none left')",
    "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'why')", "1 / 0",
    "(lambda f: f(f))(lambda f: f(f))")
ANSWERS = (
    "calm", "calm", "calm", "calm", "np.array(calm)", "torch.tensor(calm)", "tuple(calm)", "{1: 2}",
    "iter(calm)", "None", "[]", "calm[:-1]", "calm + [0.0]", "[None] * len(calm)",
    "['x'] * len(calm)",
    "[float('nan')] * len(calm)", "[1e999] * len(calm)", "[10 ** 400] * len(calm)", "calm[0]",
    "[[s] for s in calm]", "[[s] * 3 for s in calm]", "torch.tensor(calm).requires_grad_()",
    "torch.empty(len(calm), device='meta')", "np.array([object()] * len(calm))", "'1.0'", "b'12'",
    "[True] * len(calm)", "[1j] * len(calm)", "[calm] * len(calm)", "[Odd()] * len(calm)",
    "{'scores': calm}", "(calm, {'a': calm})", "(s for s in calm)", "range(len(calm))")
CODE = '''\
import atexit, gc, json, locale, logging, os, random, signal, sys, threading, time
import warnings
import numpy as np
import torch


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no words")
    __repr__ = __str__


class Nested(Silent):
    pass


class Odd:
    def __float__(self):
        raise {odd}

    def __repr__(self):
        raise Silent


calls = 0


def score(completions, **columns):
    global calls
    calls += 1
    calm = [float(text.split().count("good")) for text in completions]
    if calls == {at}:
        {deed}
        return {answer}
    return calm
'''


@cache
def calm() -> Path:
    """A run whose reward does its work and nothing else."""
    folder = ROOT / "build/soak/rewards"
    shutil.rmtree(folder, ignore_errors=True)
    runs.make_world(folder)
    _train(folder, "pass", "calm", at=0).expected(0)
    return folder / "runs/r"


def _train(folder: Path, deed: str, answer: str, at: int, odd: str = "Silent") -> runs.Ended:
    (folder / "fuzzed.py").write_text(CODE.format(deed=deed, answer=answer, at=at, odd=odd))
    return runs.run("train", *runs.words("run_name=r", *WORDS), cwd=folder)


def one_reward(draw: random.Random, folder: Path, outcomes: Counter[str]) -> None:
    """A run whose reward misbehaves once.

    Raises:
        AssertionError: the run came to something else than the calm one's numbers or a reward
            error that names the function.
    """
    expected = calm()
    for name in ("lm", "prompts.jsonl"):
        (folder / name).symlink_to(expected.parents[1] / name)
    deed, answer = draw.choice((("pass", draw.choice(ANSWERS)), (draw.choice(DEEDS), "calm"),
                                (draw.choice(DEEDS), draw.choice(ANSWERS))))
    at = draw.choice((1, 2, 3, 4))
    ended = _train(folder, deed, answer, at, draw.choice(("Silent", "SystemExit(0)", "ValueError")))
    told = f"call {at}: {deed}; return {answer}"
    assert ended.code in (0, 7), (told, ended.code, ended.said[-1500:])
    assert "Traceback" not in ended.err or ended.code == 0, (told, ended.said[-1500:])
    assert len(ended.err) < 200_000, (told, "an endless message")
    if ended.code == 7:
        assert "fuzzed.py" in ended.err or "score" in ended.err, (told, ended.err[-1500:])
    else:
        model = "model/model.safetensors"
        same = (folder / "runs/r" / model).read_bytes() == (expected / model).read_bytes()
        assert same or answer != "calm", (told, "other weights, not a word", ended.err[-500:])
    outcomes[f"exit {ended.code}"] += 1
