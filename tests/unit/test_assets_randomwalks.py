"""The random-walk benchmark: its graph, walks and model, and scores worked by hand."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppocli.builtin.names import resolve_builtin
from ppocli.rewards import randomwalks
from ppocli.rewards.randomwalks import GOAL, MAX_LENGTH, SUCCESSORS, walk_length

sys.path.append(str(Path(__file__).resolve().parents[2]))  # tools/ is in no wheel

from tools.assets.randomwalks import (
    WalkModelSettings,
    WalkSettings,
    build_randomwalks,
    draw_walks,
)

pytestmark = pytest.mark.long

# a <- b <- c <- d, a shortcut d -> b, and e <-> f, which never arrive
SMALL = {"a": "a", "b": "ac", "c": "b", "d": "bc", "e": "f", "f": "e"}


def test_shortest_lengths_by_hand():
    assert randomwalks.shortest_lengths(SMALL) == {"a": 1, "b": 2, "c": 3, "d": 3}


@pytest.mark.parametrize(("walk", "length"), [
    ("ba", 2), ("dba", 3), ("dcba", 4), ("bcba", 4), ("bcbcbcbcbcba", 12),
    ("baa", 2),  # what follows the goal is not looked at
    ("bazz", 2),
    ("a", 1),
    ("ca", None),  # no such edge
    ("dc", None),  # never arrives
    ("efefefefef", None), ("e", None), ("zba", None), ("b a", None), ("", None),
])
def test_walk_length_by_hand(walk, length):
    assert walk_length(walk, SMALL) == length


@pytest.mark.parametrize(("walk", "length", "score"), [
    ("bda", 3, 1.0),
    ("bjna", 4, 6 / 7),
    ("bdtkna", 6, 4 / 7),
    ("knakna", 3, 1.0),
    ("kna", 3, 1.0),
    ("kbda", 4, 6 / 7),
    ("kbdtkbda", 8, 2 / 7),
    ("bdtkbdtkna", 10, 0.0),  # arrives with the last node allowed
    ("bdtkbdtkbdtkna", 10, 0.0),
    ("a", 1, 1.0),
    ("ba", 10, 0.0),  # no such edge
    ("bd", 10, 0.0),  # never arrives
    ("zda", 10, 0.0),
    ("", 10, 0.0),
])
def test_scores_by_hand(walk, length, score):
    assert randomwalks.optimality([walk], prompts=["b"]) == [pytest.approx(score)]
    assert randomwalks.metrics([walk]) == {"lengths": [length],
                                           "optimality": [pytest.approx(score)]}


def test_the_graph_and_the_walks_are_those_of_trlx():
    graph, walks = draw_walks(WalkSettings())
    assert graph == SUCCESSORS
    assert set(randomwalks.SHORTEST) == set(graph)  # every start can earn a reward
    # first walks and degrees that trlX's generator draws for the seed of its recipe, 1000
    assert walks[:5] == ["sda", "fda", "ebjnbdtkna", "jnbjna", "lbusdtkbui"]
    assert [len(after) for after in graph.values()] == [
        1, 3, 4, 3, 2, 4, 4, 1, 2, 1, 4, 1, 6, 2, 1, 2, 2, 3, 2, 1, 3]
    assert len(walks) == 1000
    for walk in walks:
        assert walk[0] != GOAL
        assert len(walk) == MAX_LENGTH or walk[-1] == GOAL
        assert GOAL not in walk[:-1]
        assert all(after in graph[node] for node, after in pairwise(walk))


def test_walks_leave_numpys_global_state_alone():
    before = np.random.get_state()
    draw_walks(WalkSettings(seed=3))
    after = np.random.get_state()
    assert np.array_equal(before[1], after[1])
    assert before[2:] == after[2:]


def test_scores_and_names_need_no_torch():
    code = ("import sys; import ppocli.builtin.names, ppocli.rewards.randomwalks as r; "
            "r.optimality(['sda']); assert not {'torch', 'transformers'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_small_walk_model_is_deterministic_and_leaves_the_global_state_alone(tmp_path):
    settings = WalkModelSettings(WalkSettings(walks=60), layers=1, width=24, heads=2, epochs=2)
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    build_randomwalks(tmp_path / "one", settings)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    with torch.no_grad():
        build_randomwalks(tmp_path / "two", settings)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    shipped = resolve_builtin("randomwalks")  # the same tokenizer, whatever the model's size
    assert (tmp_path / "one/tokenizer.json").read_bytes() == (
        shipped / "tokenizer.json").read_bytes()


def test_tokenizer_of_the_shipped_model_joins_letters():
    tokenizer = AutoTokenizer.from_pretrained(resolve_builtin("randomwalks"))
    assert len(tokenizer) == 23
    ids = tokenizer("sda")["input_ids"]
    assert ids == [18, 3, 0]
    assert tokenizer.decode(ids[:1]) + tokenizer.decode(ids[1:]) == "sda"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "sda"
    assert tokenizer("z")["input_ids"] == [tokenizer.pad_token_id]
    assert tokenizer.pad_token_id != tokenizer.eos_token_id == tokenizer.bos_token_id


def test_shipped_model_starts_near_trlx():
    folder = resolve_builtin("builtin:randomwalks")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["n_layer"], config["n_embd"], config["vocab_size"]) == (6, 144, 23)
    generator = torch.Generator().manual_seed(3)
    starts = [node for node in SUCCESSORS if node != GOAL]
    ids = tokenizer(starts * 25, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        for _ in range(9):
            logits = model(input_ids=ids).logits[:, -1]
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, token], dim=1)
    # what follows the goal isn't looked at, so stopping at EOS would not change the scores
    scores = randomwalks.optimality(tokenizer.batch_decode(ids, skip_special_tokens=True))
    assert 0.2 < sum(scores) / len(scores) < 0.35
