#!/bin/sh
# Run the SDK's and integrations' tests on openai 2.x and an older LangGraph, in a venv of its own.
# Usage: scripts/test_openai2.sh [VENV] [pytest arguments...]
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv-openai2}
[ $# -eq 0 ] || shift
if ! test -x "$venv/bin/pytest"; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
    "$venv/bin/python" -m pip install --quiet --group tests --editable '.[langgraph,autogen]' \
        'openai>=2.45,<3' 'langgraph==1.1.*' 'langchain-openai==1.1.*' 'langchain>=1,<2'
fi
"$venv/bin/python" -c 'import openai, sys; print("openai", openai.__version__); sys.exit(not openai.__version__.startswith("2."))'
exec "$venv/bin/python" -m pytest tests/unit/integrations tests/unit/test_context_*.py tests/unit/test_inject_*.py "$@"
