#!/usr/bin/env bash
# Sets up the environment and runs everything that must hold.
#
#   bash scripts/test.sh           lint, types, layers, documentation, unit tests, then the tests on
#                                  several ranks, on a throw-away SLURM cluster and in a browser
#   bash scripts/test.sh --unit    without the last three
#
# As root on Debian it installs the packages of SLURM, Chromium and Prometheus; without them the last
# two parts, and the test of the alert rules, are skipped.
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
# What some hundred processes import is compiled once.
unset PYTHONDONTWRITEBYTECODE
export PATH OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# Fails on a link that leads nowhere, and on whatever a page would fetch from another host.
build_docs() {
    local site code=0
    site=$(mktemp -d)
    # Not --quiet: it would silence what --strict counts. The theme's note on its future is no error.
    NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --site-dir "$site" || code=$?
    rm -rf "$site"
    return $code
}

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

# Debian packages for tests that say so and are skipped without them:
#   install_packages "COMMAND ..." PACKAGE ...      does nothing where any of the commands is found
install_packages() {
    local commands=$1
    shift
    # Any of them: of SLURM's, then this machine belongs to a real cluster.
    # shellcheck disable=SC2086
    if command -v $commands >/dev/null; then return; fi
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    local policy=/usr/sbin/policy-rc.d made=false
    # Packages must start no daemons.
    if [ ! -e $policy ] && printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy; then
        made=true
    fi
    export DEBIAN_FRONTEND=noninteractive
    { timeout 300 apt-get update && timeout 600 apt-get install -y --no-install-recommends \
        "$@"; } >/dev/null 2>&1 || echo "apt-get could not install $*"
    if $made; then rm -f $policy; fi
}

step "ruff check" ruff check .
step "ruff format" ruff format --check .
step "pyright" pyright
step "documentation" build_docs
step "import layers" lint-imports
step "promtool" install_packages promtool prometheus
step "unit tests" python -m pytest -q -n 2 tests/unit
if [ "$unit_only" = false ]; then
    step "tests on several ranks" \
        python -m pytest -q tests --ignore tests/unit --ignore tests/slurm --ignore tests/browser
    step "SLURM" install_packages "slurmctld slurmd sbatch" slurmctld slurmd slurm-client
    step "tests on SLURM" python -m pytest -q -rs tests/slurm
    # A driver goes with one version of the browser: by name both.
    step "browser" install_packages chromedriver chromium chromium-driver
    step "tests in a browser" python -m pytest -q -rs tests/browser
fi
echo "== all passed, $SECONDS s"
