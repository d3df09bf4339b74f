#!/usr/bin/env bash
# Fails when the committed CRDs differ from what the API models generate.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh="$(mktemp -d)"
trap 'rm -rf "$fresh"' EXIT
.venv/bin/python -m grpo_operator.api.crd "$fresh"
for copy in crds helm/grpo-operator/crds; do
  diff -r "$fresh" "$copy" || { echo "$copy is out of date: run make crds" >&2; exit 1; }
done
