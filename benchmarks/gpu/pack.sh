#!/bin/bash
# Packs what benchmarks/gpu/job.py needs of Ray and TRL, for a GPU host without network that has Python 3.12,
# torch, transformers, pyarrow and pandas:  pack.sh DIRECTORY  ->  DIRECTORY/site.txz (about 30 MB), to be unpacked
# onto PYTHONPATH.
# SGLang and megatron-core come beside it.
set -euo pipefail
out=$(realpath -m "$1"); work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
platforms=(); for n in 39 35 34 31 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
packages=(
  ray==2.60.0 msgpack click 'protobuf<7' requests urllib3 charset-normalizer certifi idna jsonschema
  jsonschema-specifications referencing rpds-py attrs packaging filelock pyyaml psutil prometheus-client
  tensordict==0.15.3 pyvers orjson cloudpickle importlib_metadata zipp
  starlette==1.10.0 uvicorn==0.54.0 h11 httpx httpcore anyio sniffio
  pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-inspection typing-extensions==4.16.0
  datasets==5.2.0 multiprocess dill xxhash tqdm
  trl==1.16.0 accelerate==1.12.0
)
mkdir -p "$out" "$work/wheels" "$work/site"
for package in "${packages[@]}"; do
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --abi cp312 --abi abi3 --abi none "${platforms[@]}" -d "$work/wheels" "$package"
done
for wheel in "$work"/wheels/*.whl; do unzip -qo "$wheel" -d "$work/site"; done
cd "$work/site"
rm -rf ray/cpp ray/jars ray/dashboard/client ray/rllib ray/tune ray/train ray/serve ray/data ray/llm
find . -name '*.pyi' -delete
find . -name '*.so*' -type f -size +200k -exec strip --strip-unneeded {} \; 2>/dev/null || true
chmod +x ray/core/src/ray/raylet/raylet ray/core/src/ray/gcs/gcs_server
tar -cf - . | xz -T0 -7 > "$out/site.txz"
