"""Weights that go to servers over a process group (``rollout.transfer``), against the double of
vLLM's routes with the real extension of its workers."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from helpers import refused
from runs import app_in_process
from sessions import session_of
from vllm_double import (
    Engine,
    assert_same,
    break_off,
    config,
    disturb,
    drawn,
    engine_of,
    one_server,
    ours,
    serving,
)

from ppocli.errors import ConfigError, SamplerError
from ppocli.models.loading.language_model import DTYPES
from ppocli.sampling.vllm import plugin, transfer
from ppocli.sampling.vllm.transfer import GroupTransfer

GLOO = {"rollout__transfer": "gloo"}


@pytest.mark.parametrize("keys", [
    {}, {"model__peft": {"type": "lora", "r": 4, "lora_alpha": 8}}], ids=["whole", "lora"])
def test_samples_are_of_the_weights_that_were_sent(keys, tmp_path):
    with one_server(tmp_path, **GLOO, **keys) as (session, engine):
        for _ in range(3):
            assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
            disturb(session)
        assert engine.version.endswith("-3")
        called = [body["method"] for body in engine.bodies if "method" in body]
        assert called == ["ppocli_look", "ppocli_join", "ppocli_receive",
                          *["ppocli_look", "ppocli_receive"] * 2]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sent_weights_are_the_policys_in_the_servers_type(precision, tmp_path):
    keys = {**GLOO, "hardware__precision": precision}
    engine = Engine(config(tmp_path, "http://h", **keys))
    with one_server(tmp_path, engine=engine, **keys) as (session, _):
        disturb(session)
        drawn(session)
        held = engine.lm.state_dict()
        for name, tensor in session.policy.lm.state_dict().items():
            assert tensor.to(DTYPES[precision]).float().equal(held[name]), name


def test_a_server_that_was_started_anew_is_joined_again(tmp_path):
    engines = engine_of(tmp_path), engine_of(tmp_path)
    gone = []

    def spoil(path, number, body):
        if gone and path != "/v1/models":
            raise ConnectionResetError

    with (serving(engines[0]) as one, serving(engines[1], spoil) as other,
          session_of(config(tmp_path, one, other, **GLOO)) as session):
        drawn(session)
        gone.append(True)
        disturb(session)
        drawn(session)  # from the one that is left
        assert engines[1].version.endswith("-1")
        gone.clear()
        engines[1].worker = type(engines[1].worker)(engines[1])
        assert_same(drawn(session, 12, do_sample=False), ours(session, 12, do_sample=False))
        assert engines[1].version == engines[0].version


def test_a_server_whose_weights_broke_off_has_to_be_started_anew(tmp_path, monkeypatch):
    with one_server(tmp_path, **GLOO) as (session, engine):
        drawn(session)
        disturb(session)
        monkeypatch.setattr(GroupTransfer, "_broadcast", break_off)
        with refused(SamplerError, "No server is left", "did not take its weights: no way"):
            drawn(session)
        monkeypatch.undo()
        with refused(SamplerError, "No server is left", "has to be started anew"):
            drawn(session)
        engine.worker = type(engine.worker)(engine)
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))


def test_a_worker_that_fails_in_a_transfer_says_why(tmp_path, caplog):
    engines = engine_of(tmp_path), engine_of(tmp_path)

    def fail(weights_iterator):
        next(weights_iterator)
        raise ValueError("no room")

    engines[1].worker.reload_weights = fail
    with (serving(engines[0]) as one, serving(engines[1]) as other,
          session_of(config(tmp_path, one, other, **GLOO)) as session):
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
    assert "did not take its weights: no room; it is left out" in caplog.text


def test_a_worker_that_ends_in_a_transfer_ends_its_server(tmp_path):
    engine = engine_of(tmp_path)

    def leave(**_):
        engine.worker.ppocli_group = None  # as when the process is gone
        time.sleep(5)

    engine.worker.ppocli_receive = leave
    with (refused(SamplerError, "No server is left", "did not take its weights"),
          one_server(tmp_path, engine=engine, **GLOO) as (session, _)):
        # more than a socket takes without a reader
        session.policy.lm.register_buffer("large", torch.zeros(10**7))
        drawn(session)


def test_two_workers_of_one_rank_are_one_clear_error(tmp_path):
    engine = engine_of(tmp_path)
    join = engine.worker.ppocli_join

    def as_of_two(**words):
        torch.distributed.TCPStore("127.0.0.1", words["port"], words["world"]).add("rank 1", 1)
        return join(**words)

    engine.worker.ppocli_join = as_of_two
    with (refused(SamplerError, "data parallel servers take rollout.transfer=files only"),
          one_server(tmp_path, engine=engine, **GLOO) as (session, _)):
        drawn(session)


def test_a_server_that_another_run_takes_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "SAYS_WHY", 60.0)
    engine = engine_of(tmp_path)
    with (serving(engine) as url, session_of(config(tmp_path, url, **GLOO)) as one,
          session_of(config(tmp_path, url, **GLOO)) as other):
        drawn(one)
        receive = engine.worker.ppocli_receive

        def after_another(**words):
            engine.worker.ppocli_receive = receive
            drawn(other)
            return receive(**words)

        engine.worker.ppocli_receive = after_another
        disturb(one)
        with refused(SamplerError, "another run has taken the server"):
            drawn(one)


def test_what_can_not_take_weights_is_one_clear_error(tmp_path):
    without, older = engine_of(tmp_path, extended=False), engine_of(tmp_path)
    seen = older.worker.ppocli_look()
    older.worker.ppocli_look = lambda: {**seen, "torch": "1.9.0"}
    for engine, said in ((without, ["takes weights from files only", "vllm-command"]),
                         (older, ["runs torch 1.9 and this run 2.", "rollout.transfer=files"])):
        with (refused(SamplerError, "rollout.transfer", *said),
              one_server(tmp_path, engine=engine, **GLOO) as (session, _)):
            drawn(session)
        assert engine.asked["/pause"] == 0


def test_a_server_that_does_not_answer_in_time_is_left_out(tmp_path):
    def spoil(path, number, body):
        if body.get("method") == "ppocli_look":
            time.sleep(2)

    with (serving(engine_of(tmp_path)) as one, serving(engine_of(tmp_path), spoil) as other,
          session_of(config(tmp_path, one, other, **GLOO)) as session):
        session.sampler.servers[1]._client.timeout = 0.5
        assert_same(drawn(session, do_sample=False), ours(session, do_sample=False))
        assert "did not answer within 0.5 s" in session.sampler.servers[1].lost


def test_the_store_listens_where_the_server_reaches_it_and_nowhere_else(tmp_path):
    ports = []
    with one_server(tmp_path, **GLOO) as (session, engine):
        join = engine.worker.ppocli_join
        engine.worker.ppocli_join = lambda **words: (ports.append(words["port"]), join(**words))[1]
        drawn(session)
        listening = [one.laddr for one in psutil.Process().net_connections("tcp")
                     if one.status == psutil.CONN_LISTEN]
    assert {place.ip for place in listening} == {"127.0.0.1"}
    assert ports[0] in {place.port for place in listening}


def test_nccl_wants_a_gpu(tmp_path):
    with (refused(ConfigError, "computes on cpu", "rollout.transfer=gloo"),
          one_server(tmp_path, rollout__transfer="nccl")):
        pass


def test_the_command_names_an_extension_that_needs_torch_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ended = app_in_process(capsys)("vllm-command", "+recipe=quickstart", "rollout.transfer=gloo",
                                   code=0)
    folder = Path(plugin.__file__).parent
    assert f"PYTHONPATH={folder} python" in ended.out
    assert "--worker-extension-cls ppocli_receiver.Receiver" in ended.out
    seen = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n"
         "from ppocli_receiver import Receiver\nprint('ppocli' in sys.modules, *sys.path)"],
        cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert seen.startswith("False")
