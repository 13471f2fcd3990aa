#!/usr/bin/env bash
# Sets up the environment and runs everything that must hold.
#
#   bash scripts/test.sh           lint, types, layers, unit tests, then the tests on several ranks
#   bash scripts/test.sh --unit    without the tests on several ranks
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
unit_only=false
case ${1:-} in
"") ;;
--unit) unit_only=true ;;
*) echo "test.sh: unknown option '$1'; use --unit or nothing" >&2; exit 2 ;;
esac

python=$(bash scripts/setup_env.sh dev)
PATH=$(cd "$(dirname "$python")" && pwd):$PATH
export PATH OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

step() {
    local title=$1 begin=$SECONDS
    shift
    echo "== $title"
    "$@" </dev/null || {
        echo "== $title FAILED after $((SECONDS - begin)) s: $*"
        exit 1
    }
    echo "== $title ok, $((SECONDS - begin)) s"
}

step "ruff check" ruff check .
step "ruff format" ruff format --check .
step "pyright" pyright
step "import layers" lint-imports
step "unit tests" python -m pytest -q -n 2 tests/unit
if [ "$unit_only" = false ]; then
    step "tests on several ranks" python -m pytest -q tests --ignore tests/unit
fi
echo "== all passed, $SECONDS s"
