# Every target does all of its own set-up on a fresh Debian 12 with Python 3.11, Go 1.26 and make.
PYTHON ?= python3
DEV := PYTHONPATH=devcluster $(PYTHON) -m grpo_devcluster
VENV := .venv/bin
PYTEST := PYTHONPATH=devcluster $(VENV)/python -m pytest
CODE := operator worker_images devcluster rehearsal tests benchmarks
TEXT := $(CODE) docs helm manifests Makefile mkdocs.yml README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md

.PHONY: help demo down up gpu-node gpu-node-pack test check lint format unit worker test-megatron-next integration e2e slow soak rehearse bench-operator bench-planner bench-trainer bench-controller bench-samples bench-convert bench-cli bench-data-path bench-sync-planner bench-sync-cluster bench-sync bench-late-engine bench-sandbox bench-delta bench-job bench-rollout bench-learning bench-own-models bench-pod-steps bench-faults bench-test crds megatron-fields docs site publish-site dashboards image-locks sbom version wheel krew images publish-images chart publish-chart env clean gpu-node-site

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

demo:  ## train a tiny mixture of experts on a real single-node Kubernetes (KUBECONFIG=...: on yours)
	PYTHONPATH=devcluster $(PYTHON) -m grpo_devcluster.demo

up:  ## start the embedded Kubernetes and stay
	$(DEV) up

down:  ## remove every trace of the embedded Kubernetes
	$(DEV) down

gpu-node-site: env  ## make the folder of Python packages that gpu-node-pack packs (GRPO_GPU_NODE_WHEELS=FOLDER: with your own wheels)
	PYTHONPATH=devcluster $(VENV)/python -m grpo_devcluster.gpu_node.site

gpu-node: gpu-node-site gpu-node-pack  ## both: what devcluster/gpu-node.sh starts there

gpu-node-pack:  ## pack the embedded Kubernetes for a machine with GPUs and no network, in build/gpu-node
	PYTHONPATH=devcluster $(PYTHON) -m grpo_devcluster.gpu_node.pack

test:  ## all levels: lint, unit, worker, integration, e2e
	PYTHONPATH=devcluster $(PYTHON) -m grpo_devcluster.testing

check: lint unit  ## what to run before every commit

lint: env  ## ruff, mypy strict, import layers, spelling, generated CRDs
	$(VENV)/ruff check $(CODE)
	$(VENV)/ruff format --check $(CODE)
	$(VENV)/mypy -p grpo_operator -p grpo_worker -p grpo_devcluster -p grpo_rehearsal
	$(VENV)/mypy tests
	MYPYPATH=operator:worker_images:devcluster:rehearsal:tests:benchmarks/gpu:benchmarks/learning:benchmarks $(VENV)/mypy $$(git ls-files 'benchmarks/*.py')
	PYTHONPATH=devcluster:rehearsal $(VENV)/lint-imports
	$(VENV)/codespell $(TEXT)
	helm/check-crds.sh

format: env  ## format the code and apply ruff's safe fixes
	$(VENV)/ruff check --fix $(CODE)
	$(VENV)/ruff format $(CODE)

unit: env  ## pure logic, no network, a few minutes
	$(PYTEST) tests/unit -n 2 --durations=20 -m "not slow"

worker: env  ## Megatron-Core on gloo ranks, a real SGLang server
	$(PYTEST) tests/worker -v --durations=30 -m "not slow"

NEXT_PYTHON ?= 3.12
test-megatron-next: env  ## the trainer with Megatron-Core 0.19.2 on Python 3.12, beside uv.lock's (NEXT_PYTHON=PATH: yours)
	PYTHONPATH=devcluster $(PYTHON) -m grpo_devcluster.megatron_next $(NEXT_PYTHON)

integration:  ## API server, KubeRay and KWOK, no pods
	$(DEV) prepare
	$(PYTEST) tests/integration -v --durations=30 -m "not slow"

e2e:  ## real pods, injected faults
	$(DEV) prepare
	$(PYTEST) tests/e2e -v --timeout=2700 --durations=30 -m "not slow"

slow:  ## tests that take minutes and rarely break
	$(DEV) prepare
	GRPO_FUZZ_CASES=10000 $(PYTEST) tests/unit/operator/api/test_fuzz_spec.py
	$(PYTEST) tests/unit -m slow
	$(PYTEST) tests/worker tests/integration -v --timeout=1800 --durations=0 -m slow
	$(PYTEST) tests/e2e -v --timeout=1800 --durations=0 -m slow --ignore=tests/e2e/test_faults.py
	$(PYTEST) tests/e2e/test_faults.py -v --timeout=2700

SOAK_MINUTES ?= 60
SOAK_PROMPTS ?= 192
soak:  ## random faults on a tenth of the steps for SOAK_MINUTES, then as many calm steps; adds to benchmarks/results/reliability.json
	$(DEV) prepare
	GRPO_RECORD=1 GRPO_SOAK_MINUTES=$(SOAK_MINUTES) GRPO_SOAK_PROMPTS=$(SOAK_PROMPTS) $(PYTEST) tests/e2e/test_soak.py -v -s

rehearse: env  ## a step of 512 GPUs on virtual time, and short ones of all manifests; writes benchmarks/results/rehearsal.json
	PYTHONPATH=devcluster:rehearsal $(VENV)/python -m grpo_rehearsal.benchmark

bench-operator:  ## many jobs on KWOK nodes; writes benchmarks/results/operator.json
	$(DEV) prepare
	PYTHONPATH=devcluster $(VENV)/python benchmarks/operator/bench.py $(JOBS)

bench-planner: env  ## the planner's figures; writes benchmarks/results/planner.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/planner.py

bench-trainer: env  ## fidelity and speed of the trainer; writes benchmarks/results/trainer.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/trainer.py

bench-controller: env  ## the controller's cost at 256 ranks; adds to benchmarks/results/trainer.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/controller.py

bench-samples: env  ## a step's samples at the size of 512 GPUs, and the page of a long run of them; adds to benchmarks/results/experience.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/samples.py

bench-convert: env  ## what grpo-convert makes of other frameworks' examples: FOLDER=clones; KUBECONFIG=... asks its API server too; writes convert.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/convert.py $(FOLDER) $(if $(KUBECONFIG),--kubeconfig $(KUBECONFIG))

bench-cli: env  ## how long kubectl grpo takes to start; adds to benchmarks/results/experience.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/command_line.py

bench-data-path: env  ## a step's data path at 8 192 x 16 k tokens; writes benchmarks/results/data_path.json
	PYTHONPATH=devcluster:tests $(VENV)/python benchmarks/data_path.py

bench-sync-planner: env  ## routes of a weight sync beside their bound; adds to benchmarks/results/sync.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/sync_planner.py

bench-sync-cluster: env  ## plans executed over rated interfaces beside their prediction; needs root; adds to sync.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/sync_cluster.py

bench-sync: env  ## a version into a real engine beside a broadcast tensor by tensor; adds to benchmarks/results/sync.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/sync_speed.py

bench-late-engine: env  ## two gibibytes into an engine through an agent of 512 MiB; needs root; adds to benchmarks/results/sync.json
	GRPO_RECORD=1 $(PYTEST) tests/worker/test_late_engine.py -v -s

bench-sandbox: env  ## attacks on the sandbox of programs, and its cost; as root also as another user; adds to benchmarks/results/reliability.json
	GRPO_RECORD=1 $(PYTEST) tests/worker/test_sandbox_escapes.py -v

bench-delta: env  ## a version over 10 Gb/s, whole and by what changed; needs root; adds to benchmarks/results/sync.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/delta.py

bench-own-models:  ## every published model, shrunk, as a job; writes benchmarks/results/own_models.json
	$(DEV) prepare
	PYTHONPATH=devcluster $(VENV)/python benchmarks/own_models.py

bench-pod-steps:  ## phases of small jobs on real pods, on a quiet machine; writes benchmarks/results/pod_steps.json
	$(DEV) prepare
	PYTHONPATH=devcluster:operator:worker_images $(VENV)/python benchmarks/pod_steps.py

bench-faults:  ## recovery times of the end-to-end fault tests; adds to demo.json and rehearsal.json in benchmarks/results
	$(DEV) prepare
	GRPO_RECORD=1 $(PYTEST) tests/e2e/test_faults.py tests/e2e/test_named_errors.py tests/e2e/test_multi_host_engine.py -v --timeout=2700

bench-job: env  ## whole jobs with a core for the engine and one for the trainer; adds to benchmarks/results/trainer.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/gpu/job.py ours benchmarks/results/job_cpu.json --cpu

bench-rollout: env  ## the rollout phase beside sglang.bench_serving, on the CPU; writes benchmarks/results/rollout_cpu.json
	PYTHONPATH=devcluster $(VENV)/python benchmarks/gpu/rollout_speed.py --cpu

bench-learning: env  ## our curve beside TRL's; writes benchmarks/results/learning.json and .png
	PYTHONPATH=devcluster $(VENV)/python benchmarks/learning/run.py

bench-test:  ## all levels, and record how long they took in benchmarks/results
	GRPO_RECORD=1 PYTHONPATH=devcluster $(PYTHON) -m grpo_devcluster.testing

crds: env  ## generate crds/ from the API models
	$(VENV)/python -m grpo_operator.api.crd crds
	cp crds/*.yaml helm/grpo-operator/crds/

megatron-fields: env  ## generate the table of Megatron-Core's fields from the installed one
	PYTHONPATH=devcluster $(VENV)/python -m grpo_devcluster.megatron_fields operator/grpo_operator/api/catalog/megatron/fields.json

docs: env  ## generate docs/reference/ from the CRDs, metrics, conditions and Helm values, and the chart's README and schema
	PYTHONPATH=devcluster $(VENV)/python -m grpo_devcluster.reference docs/reference

site:  ## build the documentation as a web site, build/site; a warning fails
	$(DEV).site

publish-site:  ## commit this version's site to the branch gh-pages, beside those of other versions; REMOTE=origin: fetch the branch first, and push it
	$(DEV).site.publish $(REMOTE)

dashboards: env  ## generate the chart's Grafana dashboards
	PYTHONPATH=devcluster $(VENV)/python -m grpo_devcluster.dashboards helm/grpo-operator/files/dashboards

image-locks: env  ## generate images/*.txt, the images' packages, from uv.lock and images/bases.yaml
	PYTHONPATH=devcluster $(VENV)/python -m grpo_devcluster.image_locks

sbom: env  ## list the packages and licences of the images in dist/sbom (CycloneDX)
	PYTHONPATH=devcluster $(VENV)/python -m grpo_devcluster.sbom

version:  ## print the version, or set that of wheel, images and chart: VERSION=1.2.3
	@$(DEV).release.version $(VERSION)

wheel:  ## build the wheel in dist
	@PYTHONPATH=devcluster $(PYTHON) -c 'from grpo_devcluster.images import build_wheel; print(build_wheel())'

krew:  ## package kubectl grpo for krew in dist/krew; URL=https://... is where its archives will be
	$(DEV).release.krew $(URL)

BUILDER ?= docker
images:  ## build the images for REGISTRY=HOST/PATH (BUILDER=docker, podman or buildah)
	$(DEV).release.images $(REGISTRY) --builder $(BUILDER)

publish-images:  ## build and push them, and keep their digests in dist/images (BUILDER=podman or buildah)
	$(DEV).release.images $(REGISTRY) --builder $(BUILDER) --push

chart:  ## package the chart in dist/chart, with images of REGISTRY=HOST/PATH by DIGESTS=dist/images, and the address SOURCE=URL of the repository, if these are set
	$(DEV).release.chart $(REGISTRY) $(if $(DIGESTS),--digests $(DIGESTS)) $(if $(SOURCE),--source $(SOURCE))

publish-chart:  ## package it and push it to oci://REGISTRY
	$(DEV).release.chart $(REGISTRY) $(if $(DIGESTS),--digests $(DIGESTS)) $(if $(SOURCE),--source $(SOURCE)) --push

env:
	@$(DEV) env

clean: down  ## down, and remove what was built in the checkout
	rm -rf .venv build dist
