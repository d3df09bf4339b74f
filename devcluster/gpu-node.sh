#!/bin/bash
# The devcluster on a machine with NVIDIA GPUs and without a network. Pieces of `make gpu-node-pack` are brought to
# build/gpu-node/call-1, call-2 … of the checkout there, all at once or one after the other.
# usage: devcluster/gpu-node.sh receive   unpack what has been brought so far
#        devcluster/gpu-node.sh check     unpack, start the devcluster, run pods on GPUs, remove the devcluster
#        devcluster/gpu-node.sh up|down   start the devcluster and stay; remove it
#        devcluster/gpu-node.sh jobs OUT SECONDS [--together] MANIFEST...   run jobs of at most SECONDS each, and keep what they did in OUT
#        devcluster/gpu-node.sh faults OUT MANIFEST STEPS [FAULT...]   in the background: a job of STEPS without faults, then with them
#        devcluster/gpu-node.sh follow OUT SECONDS   print what happens there, and copy results and log to OUT; 3: it still runs
# PYTHON: the Python of the environment that pods use (python3). GPU_NODE: folder of what is unpacked (/tmp/gpu-node).
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${GPU_NODE:-/tmp/gpu-node}
export GRPO_DEVCLUSTER_PACK=$folder/pack GRPO_CACHE=$folder/cache PYTHONPATH=devcluster
python=${PYTHON:-python3}
# Code 3: other calls follow, or will not be brought because they are not needed.
unpack() { "$python" -m grpo_devcluster.gpu_node.unpack build/gpu-node "$GRPO_DEVCLUSTER_PACK" || [ $? = 3 ]; }
case "${1:-}" in
    receive) unpack ;;
    check) unpack; exec "$python" -m grpo_devcluster.gpu_node.check ;;
    up) unpack; exec "$python" -m grpo_devcluster up ;;
    jobs) unpack; shift; exec "$python" -m grpo_devcluster.gpu_node.jobs "$@" ;;
    faults) unpack; shift; exec "$python" -m grpo_devcluster.gpu_node.faults "$folder" start "$@" ;;
    follow) shift; exec "$python" -m grpo_devcluster.gpu_node.faults "$folder" follow "$@" ;;
    down) exec "$python" -m grpo_devcluster down ;;
    *) sed -n '2,10s/^# //p' "$0" >&2; exit 2 ;;
esac
