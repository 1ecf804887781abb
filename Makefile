# What one does with this repository. `make help` prints the targets: a line `## name: what it does` above each of them.
# Every recipe runs from .venv, which `make env` makes; PYTHON is only the one that makes it.

PYTHON ?= python3
VENV   := .venv/bin
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# Targets of the test cluster, where its folder is there.
-include tools/testcluster/Makefile.inc

## help: this list
.PHONY: help
help:
	@sed -n 's/^## \([A-Za-z0-9-]*\): \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-26s %s\n", $$1, $$2}'

## env: make .venv, or bring it up to date (a moment when it is)
.PHONY: env
env:
	@command -v $(PYTHON) >/dev/null || { echo "env: no $(PYTHON) here; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) tools/env.py $(PROGRESS) >&2

## constraints: solve constraints/*.txt again from pyproject.toml (ARGS=--upgrade takes newer versions)
.PHONY: constraints
constraints:
	$(VENV)/python -m tools.constraints $(ARGS)

## demo: a job that learns CartPole on this machine, from nothing
.PHONY: demo
demo: env
	$(VENV)/rljob run examples/cartpole/rljob.yaml

PYTEST := $(VENV)/python -m pytest
# What tests and the processes that they start import is compiled once, on a machine too whose environment forbids it:
# else each of some hundred processes compiles the product anew.
test test-slow test-long test-cluster: export PYTHONDONTWRITEBYTECODE :=
# Folders whose tests take nothing that another file's need: two files at a time. The others run one test after the other
# when those are over: conformance, which runs three jobs at once itself, and a new folder, which is in no list.
# The longest first, as far as nobody knows better: from the second run on tools/longest_first.py does.
SHARED_NOTHING := tests/integration tests/unit tests/shipped
# $(1) on all cores, $(2) alone, $(3) the options of both; both are told before the first failure fails it.
define pytest_twice
@failed=; \
$(PYTEST) -n 2 --dist loadfile $(1) $(3) $(PYTEST_ARGS) || failed=" $(1)"; \
$(PYTEST) $(2) $(3) $(PYTEST_ARGS) || failed="$$failed the other folders"; \
[ -z "$$failed" ] || { echo "make $@: failed in$$failed; each has its summary above" >&2; exit 1; }
endef

## test: lint and all tests that need no cluster and are not slow (thirteen minutes on 2 cores)
.PHONY: test
test: lint
	$(call pytest_twice,$(SHARED_NOTHING),$(SHARED_NOTHING:%=--ignore=%))

## test-slow: the tests marked slow that need no cluster; each mark says what takes so long
.PHONY: test-slow
test-slow: env
	$(call pytest_twice,$(SHARED_NOTHING),$(SHARED_NOTHING:%=--ignore=%),--slow -m "slow and not cluster and not programs")

## test-long: the tests marked long: further cases of what quicker tests show, and short learning and scale runs; not in .ci/run
.PHONY: test-long
test-long: env
	$(call pytest_twice,$(SHARED_NOTHING),$(SHARED_NOTHING:%=--ignore=%),--slow --long -m "long and not cluster")

## test-gpu: the tests that need an NVIDIA device; each says so and is skipped where there is none
.PHONY: test-gpu
test-gpu: env
	$(VENV)/python -m pytest tests/gpu $(PYTEST_ARGS)

# mypy takes as long as all the rest, several times, where nothing is in its cache, and one core.
## lint: ruff, mypy, the layers, generated files
.PHONY: lint
lint:
	@$(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) lint-types lint-rules

# What is known of a file goes by its content (mypy compares hashes where times and paths differ), so clones share it: one
# folder of 200 MB, which mypy makes anew for another version of itself.
lint-types: export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/rlinf-mypy
## lint-types: mypy
.PHONY: lint-types
lint-types: env
	$(VENV)/mypy

## lint-rules: ruff, the layers, generated files
.PHONY: lint-rules
lint-rules: env
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/lint-imports --no-logo
	@$(MAKE) --no-print-directory verify

## format: what ruff can repair
.PHONY: format
format: env
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

## generate: write the generated files again (CRDs, protobuf)
.PHONY: generate
generate: env
	$(VENV)/python -m tools.generate

## docs: the tables that documents get from the code, written anew; then their links, figures and metrics are checked
.PHONY: docs
docs: env
	$(VENV)/python -m tools.gen_chart_values
	$(VENV)/python -m pytest tests/shipped/test_layout.py::test_every_link_between_documents_leads_somewhere \
	    tests/shipped/test_bench_docs.py tests/unit/rlinf_operator/test_metrics.py

## verify: fail when generated files, pins or versions are not what their sources say
.PHONY: verify
verify: env
	$(VENV)/python -m tools.generate --verify
	$(VENV)/python -m tools.check_versions

## chart-check: the Helm chart linted, validated and compared with its snapshots for a matrix of values
.PHONY: chart-check
chart-check: env testcluster-build
	$(VENV)/python -m tools.chart check

## chart-snapshots: write the snapshots again (tests/shipped/snapshots); read the diff
.PHONY: chart-snapshots
chart-snapshots: env testcluster-build
	$(VENV)/python -m tools.chart snapshots

## images: build the container images into build/images (IMAGES="control actor-fsdp" chooses; torch's are left out)
.PHONY: images
images: env
	@$(VENV)/python -m tools.testcluster build buildkit
	$(VENV)/python -m tools.chart.images $(IMAGES)

BENCHES := $(filter-out bench-__init__ bench-__main__ bench-harness bench-idle bench-publish bench-report,$(patsubst tools/bench/%.py,bench-%,$(wildcard tools/bench/*.py)))

## prove: a proof of the planner (PART=exact, two-stages, paper, loop, shift, steady, schedules, placements, jobs); goes on where it was stopped (docs/planner.md)
.PHONY: prove
prove: env
	$(VENV)/python -m tools.prove $(PART) $(ARGS)

## bench: all benchmarks, one after the other; waits for an idle machine
.PHONY: bench $(BENCHES)
bench: env
	$(VENV)/python -m tools.bench --all

## bench-NAME: one of them, a file tools/bench/NAME.py; writes build/bench/NAME.json (ROWS="a b" chooses, ARGS=--small)
$(BENCHES): bench-%: env
	$(VENV)/python -m tools.bench $* $(addprefix --row ,$(ROWS)) $(ARGS)

## workloads: run every synthetic workload once, three steps each (ARGS="--mode Collocated --items 32")
.PHONY: workloads
workloads: env
	$(VENV)/python -m tools.workloads run --all $(ARGS)

## learn: CartPole with several seeds, against the bar of learning (ARGS="--seeds 20")
.PHONY: learn
learn: env
	$(VENV)/python -m tools.bench.foundation_parts.learn $(ARGS)

## learn-reasoning: language models with flow grpo beside a plain script, 75 minutes; goes on where it was stopped (docs/learning)
.PHONY: learn-reasoning
learn-reasoning: env
	$(VENV)/python -m tools.learn_reasoning $(ARGS)

## deep-channels: channels under faults that hypothesis chooses, a thousand stories instead of 25 (DEEP=5000)
.PHONY: deep-channels
deep-channels: env
	DEEP_CHANNELS=$(or $(DEEP),1000) $(VENV)/python -m pytest tests/unit/rlinf_worker/queues/test_invariants.py $(PYTEST_ARGS)

## chaos-operator: kill the operator at every write of a job's life in turn, before and after it (15 minutes)
.PHONY: chaos-operator
chaos-operator: env testcluster-ready
	CHAOS_OPERATOR=1 $(VENV)/python -m pytest --cluster tests/cluster/test_operator_every_write.py $(PYTEST_ARGS)

## learn-plans: the same with another plan every 10 steps, against undisturbed seeds (ARGS="--seeds 8 --changed 8")
.PHONY: learn-plans
learn-plans: env
	$(VENV)/python -m tools.bench.foundation_parts.learn_plans $(ARGS)

## mutants: small mistakes in the product's code, and which of them no unit test sees (ARGS="--seed 7 --count 150")
.PHONY: mutants
mutants: env
	$(VENV)/python -m tools.mutants $(ARGS)

## test-turns: 200 changes of turns over two pods, a rank of the gang stopped every 20 (a minute)
.PHONY: test-turns
test-turns: env
	TURNS_LONG=1 $(VENV)/python -m pytest tests/integration/test_turns_over_pods.py

## test-gangs: jobs of allOrNothing under real coscheduling and Volcano, built for it (10 minutes the first time)
.PHONY: test-gangs
test-gangs: env
	$(VENV)/python -m tools.testcluster build coscheduling
	$(VENV)/python -m tools.testcluster build volcano
	GANGS=1 $(VENV)/python -m pytest --cluster --slow tests/cluster/test_operator_all_or_nothing.py -k scheduler_of_gangs

## chaos: 10 minutes of random faults over a job that learns, and a verdict (ARGS="--seconds 60 --seed 7", "--schedules 200")
.PHONY: chaos
chaos: env
	$(VENV)/python -m tools.chaos $(ARGS)

## clean: remove what builds and tests left (not .venv)
.PHONY: clean
clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
