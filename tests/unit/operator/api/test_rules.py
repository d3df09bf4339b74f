"""Agreement of both sides of every rule: CEL, as the API server evaluates it, and Python."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_operator.api.base import Model
from grpo_operator.api.rules import Rule, UpdateRule
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.render.certificates import Authority
from support.cel import SCHEMA, Changes, cel_holds, changed, defaulted

CA = Authority("m" * 64, "default").trusted(0)
MODEL_VOLUME = {"mountPath": "/models", "pvc": "models"}
HUB = {"mountPath": "/models", "uri": "hf://org/name"}
ENGINE = "rollout.template.engine"
FILES = {"data.train": "/data/train.jsonl", "reward": {"builtin": "math"}}
GCD = {"name": "gcd", "data": "reasoning-gym:gcd"}
ROWS = {"name": "rows", "data": "/data/test.jsonl"}
COLOCATED = {
    "mode": "colocated",
    "trainer": {
        "device": "cuda",
        "nodes": 2,
        "gpusPerNode": 4,
        "miniBatchSize": 1,
        "offload": {"parameters": True, "gradients": True, "optimizer": True},
    },
    "rollout": {
        "template": {
            "replicas": 2,
            "engine": {"device": "cuda", "tensorParallel": 4, "gpusPerNode": 4, "tokenizer": True},
        }
    },
}
OVERLAP: Changes = {
    "trainer.device": "cuda",
    "trainer.recompute": "none",
    "trainer.moe": {"overlapCommunication": True},
    "trainer.parallelism": {"expert": 2},
}
IPC = {"weightSync": {"transport": "cuda-ipc"}}
RDMA: Changes = {"trainer.device": "cuda"}
S3 = {"uri": "s3://runs/grpo", "endpoint": "http://s3.example:9000", "region": "eu-1", "secret": "keys"}

# Changes to the manifest, by dotted path. Together they violate every rule, and most rules also hold in a
# case close to the violation.
CASES: dict[str, Changes] = {
    "manifest": {},
    "batch": {"trainer.miniBatchSize": 5},
    "packed": {"trainer.maxTokensPerGpu": 64},
    "packed enough": {"trainer.maxTokensPerGpu": 2**20},
    "packed with context parallelism": {
        "trainer.maxTokensPerGpu": 2**20,
        "trainer.parallelism": {"context": 2},
    },
    "packed log-probs": {"trainer.maxTokensPerGpu": 2**20, "trainer.logProbMaxTokensPerGpu": 2**21},
    "packed log-probs of few tokens": {
        "trainer.maxTokensPerGpu": 2**20,
        "trainer.logProbMaxTokensPerGpu": 64,
    },
    "packed log-probs of padded updates": {"trainer.logProbMaxTokensPerGpu": 2**20},
    "padded log-probs": {"trainer.logProbMicroBatchSizePerGpu": 256},
    "padded log-probs of packed updates": {
        "trainer.maxTokensPerGpu": 2**20,
        "trainer.logProbMicroBatchSizePerGpu": 256,
    },
    "checked gradients": {"trainer.gradientCheck": {"everySteps": 2}},
    "checked gradients on GPUs": {"trainer.device": "cuda", "trainer.gradientCheck": {"everySteps": 2}},
    "checked gradients that are deterministic": {
        "trainer.device": "cuda",
        "trainer.deterministic": True,
        "trainer.gradientCheck": {"everySteps": 2},
    },
    "long prompts": {"data.promptLength": 5000},
    "long prompts in a standing pool": {"data.promptLength": 5000, "rollout": {"poolRef": {"name": "x"}}},
    "files": FILES,
    "files without reward": {"data.train": "/data/train.jsonl"},
    "file URL in a volume": {**FILES, "data.train": "s3://b/x.json", "data.volume": MODEL_VOLUME},
    "file in a volume": {**FILES, "data.volume": {"mountPath": "/data", "pvc": "x"}},
    "file in another volume": {**FILES, "data.volume": MODEL_VOLUME},
    "file that is a volume": {**FILES, "data.volume": {"mountPath": "/data/train.jsonl", "pvc": "x"}},
    "validation": {"validation": {"sets": [GCD]}},
    "validation of two sets": {"validation": {"sets": [GCD, {**GCD, "name": "other"}]}},
    "validation of two sets with one name": {"validation": {"sets": [GCD, GCD]}},
    "validation with a best checkpoint": {"validation": {"sets": [GCD], "keepBest": "gcd"}},
    "validation with the best of another set": {"validation": {"sets": [GCD], "keepBest": "other"}},
    "validation that stops": {
        "validation": {"sets": [GCD], "keepBest": "gcd", "onRegression": "stop", "regressionMargin": 0.1}
    },
    "validation that stops for no set": {"validation": {"sets": [GCD], "onRegression": "stop"}},
    "validation that rolls back": {
        "validation": {"sets": [GCD], "keepBest": "gcd", "onRegression": "rollback", "rollbacks": 2}
    },
    "validation that rolls back for no set": {"validation": {"sets": [GCD], "onRegression": "rollback"}},
    "validation by sampling": {"validation": {"sets": [GCD], "samplesPerPrompt": 4, "temperature": 0.7}},
    "validation by greedy samples": {"validation": {"sets": [GCD], "samplesPerPrompt": 4}},
    "validation with pass@k": {
        "validation": {"sets": [GCD], "samplesPerPrompt": 4, "temperature": 0.7, "passAt": [4, 1]}
    },
    "validation with pass@k of more than all": {
        "validation": {"sets": [GCD], "samplesPerPrompt": 4, "temperature": 0.7, "passAt": [1, 5]}
    },
    "validation with one pass@k twice": {
        "validation": {"sets": [GCD], "samplesPerPrompt": 4, "temperature": 0.7, "passAt": [2, 1, 2]}
    },
    "validation with long responses": {"validation": {"sets": [GCD], "responseLength": 10**6}},
    "validation with short responses": {"validation": {"sets": [GCD], "responseLength": 1}},
    "validation by files without reward": {"validation": {"sets": [ROWS]}},
    "validation by files": {**FILES, "validation": {"sets": [ROWS]}},
    "validation by a reward model": {
        "reward": {"model": {"path": "/judge"}},
        "validation": {"sets": [GCD]},
    },
    "validation in a volume": {
        **FILES,
        "data.volume": {"mountPath": "/data", "pvc": "x"},
        "validation": {"sets": [ROWS]},
    },
    "validation beside a volume": {
        **FILES,
        "data.volume": {"mountPath": "/data", "pvc": "x"},
        "validation": {"sets": [{**ROWS, "data": "/other/test.jsonl"}]},
    },
    "model in a volume": {"model": {"path": "/models/tiny", "volume": MODEL_VOLUME}},
    "model that is a volume": {"model": {"path": "/models", "volume": MODEL_VOLUME}},
    "model beside a volume": {"model": {"path": "/models-2/tiny", "volume": MODEL_VOLUME}},
    "one mount path": {
        "model": {"path": "/models/tiny", "volume": MODEL_VOLUME},
        **FILES,
        "data.train": "/models/train.jsonl",
        "data.volume": MODEL_VOLUME,
    },
    "volume without source": {"model": {"path": "/models", "volume": {"mountPath": "/models"}}},
    "volume with two sources": {"model": {"path": "/models", "volume": {**HUB, "pvc": "x"}}},
    "volume with three sources": {"model": {"path": "/models", "volume": {**HUB, "pvc": "x", "path": "/x"}}},
    "hub mirror": {"model": {"path": "/models", "volume": {**HUB, "endpoint": "https://mirror"}}},
    "mirror of no hub": {
        "model": {"path": "/models", "volume": {**HUB, "uri": "s3://x/y", "endpoint": "https://mirror"}}
    },
    "digest without uri": {
        "model": {"path": "/models", "volume": {**MODEL_VOLUME, "digest": f"sha256:{'0' * 64}"}}
    },
    "credential without uri": {
        "model": {"path": "/models", "volume": {**MODEL_VOLUME, "credential": {"secret": "hub"}}}
    },
    "reserved mount": {"model": {"path": "/opt/x", "volume": {"mountPath": "/opt/x", "pvc": "x"}}},
    "reserved mount itself": {"model": {"path": "/opt", "volume": {"mountPath": "/opt", "pvc": "x"}}},
    "nearly reserved mount": {"model": {"path": "/optical", "volume": {"mountPath": "/optical", "pvc": "x"}}},
    "delta": {"weightSync": {"mode": "delta"}},
    "delta staged": {"weightSync": {"mode": "delta", "transport": "staged"}},
    "delta direct": {"weightSync": {"mode": "delta", "transport": "gloo"}},
    "reward without source": {"reward": {}},
    "reward with two functions": {"reward": {"function": "m:f", "url": "http://v"}},
    "reward model": {"reward": {"model": {"path": "/judge"}}},
    "reward model with a function": {"reward": {"model": {"path": "/judge"}, "builtin": "math"}},
    "reward model with filtered groups": {
        "reward": {"model": {"path": "/judge"}},
        "algorithm.filterGroups": {},
    },
    "filtered groups": {"algorithm.filterGroups": {}},
    "partial rollouts": {"staleness": {"partialRollouts": True}},
    "partial rollouts off-policy": {"staleness": {"partialRollouts": True, "maxVersionLag": 1}},
    "routing replay": {"algorithm.routingReplay": True},
    "routing replay with experts": {"algorithm.routingReplay": True, f"{ENGINE}.returnRoutedExperts": True},
    "routing replay of partial rollouts": {
        "algorithm.routingReplay": True,
        f"{ENGINE}.returnRoutedExperts": True,
        "staleness": {"partialRollouts": True, "maxVersionLag": 1},
    },
    "routing replay in a standing pool": {
        "algorithm.routingReplay": True,
        "rollout": {"poolRef": {"name": "x"}},
    },
    "stop": {"algorithm.stop": ["."], f"{ENGINE}.tokenizer": False},
    "no stop": {"algorithm.stop": [], f"{ENGINE}.tokenizer": False},
    "stop with tokenizer": {"algorithm.stop": ["."], f"{ENGINE}.tokenizer": True},
    "gae without critic": {"algorithm.advEstimator": "gae"},
    "gae": {"algorithm.advEstimator": "gae", "algorithm.critic": {}, "algorithm.samplesPerPrompt": 1},
    "grpo with critic": {"algorithm.critic": {}},
    "one sample": {"algorithm.samplesPerPrompt": 1},
    "one sample of reinforce": {
        "algorithm.samplesPerPrompt": 1,
        "algorithm.advEstimator": "reinforce_plus_plus",
    },
    "no token": {"algorithm.topK": 0},
    "unused reference": {"algorithm.refreshReferenceSteps": 2, "algorithm.useKlLoss": False},
    "reference in the reward": {
        "algorithm.refreshReferenceSteps": 2,
        "algorithm.useKlLoss": False,
        "algorithm.useKlInReward": True,
    },
    "ranks": {"trainer.nodes": 3, "trainer.parallelism": {"tensor": 2}},
    "expert ranks": {"trainer.nodes": 2, "trainer.parallelism": {"expert": 4}},
    "auto": {"trainer.parallelism": {"auto": True}},
    "auto with a size": {"trainer.parallelism": {"auto": True, "expert": 2}},
    "auto with a stage": {"trainer.parallelism": {"auto": True, "layersInLastStage": 1}},
    "auto with a default": {"trainer.parallelism": {"auto": True, "tensor": 1}},
    "stage without pipeline": {"trainer.parallelism": {"layersInFirstStage": 1}},
    "stage of a pipeline": {"trainer.parallelism": {"pipeline": 2, "layersInFirstStage": 1}},
    "chunks without pipeline": {"trainer.parallelism": {"virtualPipeline": 2}},
    "modules": {"trainer.recompute": "selective", "trainer.recomputeModules": ["layernorm", "mlp"]},
    "default modules": {"trainer.recompute": "selective"},
    "modules of whole layers": {"trainer.recompute": "full", "trainer.recomputeModules": ["mlp"]},
    "module twice": {"trainer.recompute": "selective", "trainer.recomputeModules": ["mlp", "mlp"]},
    "module inside another": {
        "trainer.recompute": "selective",
        "trainer.recomputeModules": ["moe", "shared_experts"],
    },
    "layers": {"trainer.recompute": "full", "trainer.recomputeLayers": 2},
    "layers of modules": {"trainer.recompute": "selective", "trainer.recomputeLayers": 2},
    "activations of experts": {
        "trainer.device": "cuda",
        "trainer.recompute": "selective",
        "trainer.recomputeModules": ["moe_act"],
    },
    "activations of experts on CPUs": {
        "trainer.device": "cpu",
        "trainer.recompute": "selective",
        "trainer.recomputeModules": ["moe_act"],
    },
    "narrow moments": {
        "trainer.device": "cuda",
        "trainer.precisionAwareOptimizer": {"expAvgDtype": "bf16"},
    },
    "narrow moments on CPUs": {
        "trainer.device": "cpu",
        "trainer.precisionAwareOptimizer": {"expAvgSqDtype": "bf16"},
    },
    "offloaded activations": {
        "trainer.device": "cuda",
        "trainer.recompute": "selective",
        "trainer.recomputeModules": ["layernorm", "moe_act"],
        "trainer.offload": {"activations": ["attn_norm", "core_attn", "attn_proj", "moe_act"]},
    },
    "offloaded activations of whole layers": {
        "trainer.device": "cuda",
        "trainer.recompute": "full",
        "trainer.offload": {"activations": ["attn_norm"]},
    },
    "offloaded activations of local kernels": {
        "trainer.device": "cuda",
        "trainer.kernels": "local",
        "trainer.recompute": "none",
        "trainer.offload": {"activations": ["attn_norm"]},
    },
    "offloaded activations on CPUs": {
        "trainer.recompute": "none",
        "trainer.offload": {"activations": ["mlp_norm"]},
    },
    "offloaded activations beside overlapping communication": {
        "trainer.device": "cuda",
        "trainer.recompute": "none",
        "trainer.parallelism": {"expert": 2},
        "trainer.moe": {"overlapCommunication": True},
        "trainer.offload": {"activations": ["attn_norm"]},
    },
    "offloaded twice": {
        "trainer.device": "cuda",
        "trainer.recompute": "none",
        "trainer.offload": {"activations": ["attn_norm", "attn_norm"]},
    },
    "offloaded projection without attention": {
        "trainer.device": "cuda",
        "trainer.recompute": "none",
        "trainer.offload": {"activations": ["attn_proj"]},
    },
    "offloaded and recomputed": {
        "trainer.device": "cuda",
        "trainer.recompute": "selective",
        "trainer.recomputeModules": ["mla_up_proj"],
        "trainer.offload": {"activations": ["core_attn"]},
    },
    "fp8": {"trainer.device": "cuda", "trainer.precision": "fp8-block128"},
    "fp8 on CPUs": {"trainer.device": "cpu", "trainer.precision": "fp8-block128"},
    "fp8 of local kernels": {
        "trainer.device": "cuda",
        "trainer.kernels": "local",
        "trainer.precision": "fp8-block128",
    },
    "DeepEP": {
        "trainer.device": "cuda",
        "trainer.moe": {"dispatcher": "deepep"},
        "trainer.parallelism": {"expert": 2},
    },
    "DeepEP in a layout to be chosen": {
        "trainer.device": "cuda",
        "trainer.moe": {"dispatcher": "deepep"},
        "trainer.parallelism": {"auto": True},
    },
    "DeepEP with all experts on each rank": {
        "trainer.device": "cuda",
        "trainer.moe": {"dispatcher": "deepep"},
        "trainer.parallelism": {"expert": 1},
    },
    "DeepEP of local kernels": {
        "trainer.device": "cuda",
        "trainer.kernels": "local",
        "trainer.moe": {"dispatcher": "deepep"},
        "trainer.parallelism": {"expert": 2},
    },
    "DeepEP on CPUs": {"trainer.moe": {"dispatcher": "deepep"}, "trainer.parallelism": {"expert": 2}},
    "overlap": OVERLAP,
    "overlap in a layout to be chosen": OVERLAP | {"trainer.parallelism": {"auto": True}},
    "overlap with all experts on each rank": OVERLAP | {"trainer.parallelism": {"expert": 1}},
    "overlap in stages": OVERLAP | {"trainer.nodes": 4, "trainer.parallelism": {"expert": 2, "pipeline": 2}},
    "overlap in interleaved stages": OVERLAP
    | {"trainer.nodes": 4, "trainer.parallelism": {"expert": 2, "pipeline": 2, "virtualPipeline": 2}},
    "overlap of whole layers": OVERLAP | {"trainer.recompute": "full"},
    "overlap of whole experts": OVERLAP
    | {"trainer.recompute": "selective", "trainer.recomputeModules": ["moe"]},
    "overlap of parts": OVERLAP
    | {"trainer.recompute": "selective", "trainer.recomputeModules": ["layernorm"]},
    "overlap on CPUs": OVERLAP | {"trainer.device": "cpu"},
    "overlap beside drafts": OVERLAP | {"model.multiTokenPrediction": True},
    "alltoall on CPUs": {"trainer.moe": {"dispatcher": "alltoall"}},
    "two pools": {"rollout.poolRef": {"name": "x"}},
    "no pool": {"rollout": {}},
    "too few engines": {"rollout.template.minAvailable": 9},
    "expert engines": {f"{ENGINE}.tensorParallel": 4, f"{ENGINE}.expertParallel": 3},
    "attention engines": {f"{ENGINE}.tensorParallel": 4, f"{ENGINE}.attentionDataParallel": 3},
    "all-to-all on CPUs": {f"{ENGINE}.moeA2aBackend": "deepep"},
    "all-to-all beside other experts": {
        f"{ENGINE}.device": "cuda",
        f"{ENGINE}.gpusPerNode": 4,
        f"{ENGINE}.tensorParallel": 4,
        f"{ENGINE}.expertParallel": 2,
        f"{ENGINE}.moeA2aBackend": "deepep",
    },
    "all-to-all": {
        f"{ENGINE}.device": "cuda",
        f"{ENGINE}.gpusPerNode": 4,
        f"{ENGINE}.tensorParallel": 4,
        f"{ENGINE}.expertParallel": 4,
        f"{ENGINE}.moeA2aBackend": "deepep",
    },
    "logits of replicas": {
        f"{ENGINE}.tensorParallel": 4,
        f"{ENGINE}.attentionDataParallel": 4,
        f"{ENGINE}.dpLmHead": True,
    },
    "logits of one replica": {f"{ENGINE}.dpLmHead": True},
    "drafts": {
        f"{ENGINE}.speculative": "mtp",
        f"{ENGINE}.device": "cuda",
        "model.multiTokenPrediction": True,
    },
    "drafts on CPUs": {f"{ENGINE}.speculative": "mtp", "model.multiTokenPrediction": True},
    "drafts without their layer": {f"{ENGINE}.speculative": "mtp"},
    "drafts of an engine that is deterministic": {
        f"{ENGINE}.speculative": "mtp",
        f"{ENGINE}.deterministic": True,
    },
    "drafts of an engine that may not be deterministic": {
        f"{ENGINE}.speculative": "mtp",
        f"{ENGINE}.deterministic": False,
    },
    "drafts and routed experts": {f"{ENGINE}.speculative": "mtp", f"{ENGINE}.returnRoutedExperts": True},
    "drafts and a least probability": {f"{ENGINE}.speculative": "mtp", "algorithm.minP": 0.1},
    "a least probability": {"algorithm.minP": 0.1},
    "other arguments": {f"{ENGINE}.extraArgs": ["--attention-backend", "triton"]},
    "argument of a field": {f"{ENGINE}.extraArgs": ["--attention-backend", "triton", "--tp-size=4"]},
    "GPUs of an engine": {f"{ENGINE}.device": "cuda", f"{ENGINE}.tensorParallel": 4},
    "no store": {"checkpoint.store": {}},
    "two stores": {"checkpoint.store": {"path": "/store", "pvc": "store"}},
    "a bucket": {"checkpoint.store": S3},
    "a bucket of another kind": {"checkpoint.store": {"uri": "gs://runs/grpo"}},
    "a bucket beside a claim": {"checkpoint.store": S3 | {"pvc": "store"}},
    "an endpoint of a claim": {"checkpoint.store": {"pvc": "store", "endpoint": "http://s3:9000"}},
    "a key for another kind": {
        "checkpoint.store": {"uri": "gs://runs/grpo", "secret": "keys", "endpoint": "http://gs:4443"}
    },
    "a region of another kind": {"checkpoint.store": {"uri": "gs://runs/grpo", "region": "eu-1"}},
    "a fork in a bucket": {"checkpoint.store": S3, "checkpoint.resumeFrom": {"job": "another"}},
    "a fork of a bucket": {"checkpoint.store": S3, "checkpoint.resumeFrom": {"uri": "s3://other/x/y"}},
    "a fork of a path in a bucket": {"checkpoint.store": S3, "checkpoint.resumeFrom": {"path": "/store/x"}},
    "a fork of a bucket in a claim": {"checkpoint.resumeFrom": {"uri": "s3://other/x/y"}},
    "a fork of another cloud": {"checkpoint.store": S3, "checkpoint.resumeFrom": {"uri": "gs://other/x"}},
    "a fork of a job and a bucket": {
        "checkpoint.store": S3,
        "checkpoint.resumeFrom": {"job": "another", "uri": "s3://other/x"},
    },
    "exports in a bucket": {"checkpoint.store": S3, "checkpoint.exportEverySteps": 10},
    "an export in a bucket": {"checkpoint.store": S3, "checkpoint.exportAtEnd": True},
    "samples of the next step in a bucket": {"checkpoint.store": S3, "staleness.maxVersionLag": 1},
    "routed experts of the next step in a bucket": {
        "checkpoint.store": S3,
        "staleness.maxVersionLag": 1,
        "algorithm.routingReplay": True,
    },
    "downloads into a bucket": {
        "checkpoint.store": S3,
        "model.volume": {"mountPath": "/models", "uri": "hf://a/b"},
    },
    "a claim with files beside a bucket": {
        "checkpoint.store": S3,
        "data.volume": {"mountPath": "/data", "pvc": "data"},
    },
    "profile": {"observability": {"profile": {"stepStart": 2, "stepEnd": 2}}},
    "profile backwards": {"observability": {"profile": {"stepStart": 3, "stepEnd": 2}}},
    "profile without an end": {"observability": {"profile": {"stepStart": 2}}},
    "profile without steps": {"observability": {"profile": {"ranks": [1]}}},
    "a fork": {"checkpoint.resumeFrom": {"job": "another", "step": 100}},
    "a fork of the last step": {"checkpoint.resumeFrom": {"path": "/store/another", "step": 120}},
    "a fork with the weights": {
        "checkpoint.resumeFrom": {"path": "/store/another", "step": 120, "load": "weights"}
    },
    "a fork of two sources": {"checkpoint.resumeFrom": {"job": "another", "path": "/store/another"}},
    "a fork of nothing": {"checkpoint.resumeFrom": {"step": 5}},
    "nsight without steps": {"observability": {"profile": {"tool": "nsight"}}},
    "nsight on CPUs": {"observability": {"profile": {"tool": "nsight", "stepStart": 1, "stepEnd": 2}}},
    "a trackio run in the store": {"observability": {"trackio": {}}},
    "a trackio run in two places": {
        "observability": {"trackio": {"space": "me/runs", "serverUrl": "https://trackio.example"}}
    },
    "divergence without a range": {"divergence": {"limits": [{"metric": "actor/ppo_kl"}]}},
    "divergence": {"divergence": {"limits": [{"metric": "critic/score/mean", "minimum": 0.1}], "steps": 2}},
    "empty threshold": {"observability": {"thresholds": [{"metric": "x"}, {"metric": "y", "maximum": 0.0}]}},
    "RDMA of CPU pods": {"scheduling": {"rdma": {"devices": [{"resource": "rdma/hca"}]}}},
    "RDMA of trainers": RDMA | {"scheduling": {"rdma": {"devices": [{"resource": "rdma/hca", "count": 8}]}}},
    "RDMA of engines": {
        f"{ENGINE}.device": "cuda",
        "scheduling": {"rdma": {"devices": [{"resource": "rdma/hca"}]}},
    },
    "RDMA without a way": RDMA | {"scheduling": {"rdma": {}}},
    "a resource twice": RDMA
    | {"scheduling": {"rdma": {"devices": [{"resource": "rdma/hca"}, {"resource": "rdma/hca"}]}}},
    "GPUs as RDMA devices": RDMA
    | {"scheduling": {"rdma": {"devices": [{"resource": "nvidia.com/gpu", "count": 8}]}}},
    "rails": RDMA
    | {
        "scheduling": {
            "rdma": {
                "devices": [{"resource": "nvidia.com/rail0"}, {"resource": "nvidia.com/rail1"}],
                "networks": ["fabric/rail0", "rail1"],
            }
        }
    },
    "host network": RDMA | {"scheduling": {"networkPolicy": False, "rdma": {"hostNetwork": True}}},
    "egress": {"scheduling": {"egress": {"to": [{"cidr": "10.0.0.0/8", "ports": [443]}]}}},
    "egress without a policy": {"scheduling": {"networkPolicy": False, "egress": {}}},
    "tls": {"scheduling": {"tls": {}}},
    "tls of a Secret": {"scheduling": {"tls": {"secretName": "tls", "caBundle": CA}}},
    "tls of a Secret, and nothing trusted": {"scheduling": {"tls": {"secretName": "tls"}}},
    "tls with a CA, and no certificate of it": {"scheduling": {"tls": {"caBundle": CA}}},
    "egress to two": {"scheduling": {"egress": {"to": [{"cidr": "10.0.0.0/8", "namespace": "a"}]}}},
    "egress to nothing": {"scheduling": {"egress": {"to": [{"ports": [443]}]}}},
    "host network behind a policy": RDMA | {"scheduling": {"rdma": {"hostNetwork": True}}},
    "networks of the host network": RDMA
    | {"scheduling": {"networkPolicy": False, "rdma": {"hostNetwork": True, "networks": ["rail0"]}}},
    "colocated": COLOCATED,
    "colocated in a standing pool": {**COLOCATED, "rollout": {"poolRef": {"name": "x"}}},
    "colocated on other devices": {**COLOCATED, "trainer.device": "cpu"},
    "colocated with other GPUs": {**COLOCATED, "trainer.gpusPerNode": 8},
    "colocated over two nodes": {**COLOCATED, f"{ENGINE}.nodesPerEngine": 2},
    "colocated with more engines": {**COLOCATED, "rollout.template.replicas": 3},
    "colocated without offloading": {**COLOCATED, "trainer.offload.gradients": False},
    "colocated off-policy": {**COLOCATED, "staleness": {"maxVersionLag": 1}},
    "colocated with spare nodes": {**COLOCATED, "trainer.spareNodes": 1},
    "colocated with a double buffer": {**COLOCATED, f"{ENGINE}.doubleBuffer": True},
    "colocated over NCCL": {**COLOCATED, "weightSync": {"transport": "nccl"}},
    "colocated over CUDA IPC": {**COLOCATED, **IPC, "trainer.nodes": 1},
    "CUDA IPC on two nodes": {**COLOCATED, **IPC},
    "CUDA IPC on CPUs": IPC,
    "colocated on CPUs": {"mode": "colocated"},
}
FIXED: dict[str, Changes] = {
    "model, data, reward": {"seed": 5},
    "trainer is fixed": {"trainer.nodes": 4},
    "rollout.poolRef is fixed": {"rollout": {"poolRef": {"name": "x"}}},
    "validation is fixed": {"validation": {"sets": [GCD]}},
    "divergence is fixed": {"divergence": {"limits": [{"metric": "actor/grad_norm", "maximum": 9.0}]}},
    "mode is fixed": {"mode": "colocated"},
    "managedBy is fixed": {"managedBy": "kueue.x-k8s.io/multikueue"},
    "head.gcsFaultTolerance is fixed": {"head.gcsFaultTolerance": {"redisAddress": "redis:6379"}},
    "checkpoint.resumeFrom is fixed": {"checkpoint.resumeFrom": {"job": "another"}},
}


def models(model: Model, node: dict[str, Any]) -> Iterator[tuple[Model, dict[str, Any]]]:
    """Yield every object of a spec, as a pydantic model and as JSON-compatible data."""
    yield model, node
    for name, field in type(model).model_fields.items():
        value, data = getattr(model, name), node.get(field.alias or name)
        values, items = (value, data) if isinstance(value, list) else ([value], [data])
        for inner, part in zip(values, items or [], strict=False):
            if isinstance(inner, Model) and part is not None:
                yield from models(inner, part)


def all_models(model: type[Model] = Model) -> Iterator[type[Model]]:
    for inner in model.__subclasses__():
        yield inner
        yield from all_models(inner)


# Those of pools without a job are in test_serve.py.
RULES = {
    model: model.rules for model in all_models() if "rules" in vars(model) and model is not RolloutPoolSpec
}


@pytest.fixture(autouse=True, scope="module")
def unchecked() -> Iterator[None]:
    """Let models be built although they violate rules, so that every rule is evaluated."""
    with pytest.MonkeyPatch.context() as patch:
        for model in RULES:
            patch.setattr(model, "rules", ())
        yield


def outcomes(spec: dict[str, Any]) -> list[tuple[Rule[Any], bool, bool]]:
    """Return every rule that applies to a spec, with its result in CEL and in Python."""
    pairs = models(GRPOJobSpec.model_validate(spec), defaulted(spec, SCHEMA))
    return [
        (rule, cel_holds(rule, node), bool(rule.holds(model)))
        for model, node in pairs
        for rule in RULES.get(type(model), ())
    ]


@cache
def outcomes_of(name: str) -> list[tuple[Rule[Any], bool, bool]]:
    return outcomes(changed(CASES[name]))


def disagreements(results: list[tuple[Rule[Any], bool, bool]]) -> list[str]:
    return [f"{rule.message}: CEL {cel}, Python {python}" for rule, cel, python in results if cel != python]


@pytest.mark.parametrize("name", CASES)
def test_cel_and_python_agree(name: str) -> None:
    assert disagreements(outcomes_of(name)) == []


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(sorted(CASES)), min_size=2, max_size=4))
def test_cel_and_python_agree_on_combined_changes(names: list[str]) -> None:
    assert disagreements(outcomes(changed(*(CASES[name] for name in names)))) == []


def test_the_cases_violate_every_rule() -> None:
    results = [outcome for name in CASES for outcome in outcomes_of(name)]
    used = {rule.message for rules in RULES.values() for rule in rules}
    assert {rule.message for rule, holds, _ in results if not holds} == used
    assert {rule.message for rule, holds, _ in results if holds} == used


def test_the_manifest_violates_no_rule() -> None:
    assert all(cel and python for _, cel, python in outcomes(changed()))


@pytest.mark.parametrize("rule", GRPOJobSpec.update_rules, ids=lambda rule: rule.message.split(" is ")[0])
def test_fixed_fields_cannot_be_updated(rule: UpdateRule) -> None:
    old = defaulted(changed(), SCHEMA)
    (change,) = (change for start, change in FIXED.items() if rule.message.startswith(start))
    assert cel_holds(rule, old, old)
    assert not cel_holds(rule, defaulted(changed(change), SCHEMA), old)


def test_an_error_shows_the_values_of_the_fields() -> None:
    (rule,) = (rule for rule in RULES[GRPOJobSpec] if "trainer.miniBatchSize" in rule.message)
    error = rule.error(GRPOJobSpec.model_validate(changed(CASES["batch"])))
    assert error.endswith("(got data.trainBatchSize: 8, trainer.miniBatchSize: 5)")
