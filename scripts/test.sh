#!/usr/bin/env bash
# Sets up the environment and runs everything that must hold, in groups side by side.
#
#   bash scripts/test.sh                        all parts
#   bash scripts/test.sh --parts lint,slurm     some of: lint, unit, ranks, slurm, browser, nightly,
#                                               gpu_stub
#   bash scripts/test.sh --unit                 the same as --parts lint,unit
#   bash scripts/test.sh --quick                lint, unit, and one run of four ranks: it trains,
#                                               measures noise, changes its layout, saves, resumes
#
# `ranks` has every kind of test once: each dimension, flag and way to end, under few layouts. What it
# leaves out bears the mark `nightly`, and the part of that name runs it: the other layouts, models
# and commands in the same comparisons; further engines, disks and faults; what a link or a step is
# timed for; the core without each extra, the rank tests of all extras, all of this on the newest
# megatron-core with its checkpoints, kills and moves of experts; and `gpu_stub`.
# `ranks` runs those of the extras that have changed in the four hours before the last commit, or of
# all if their contract has. `gpu_stub` runs torch's CUDA build (5 GB, in an environment of its own)
# on a stub of CUDA's libraries.
#
# PARTS names the parts, too. As root on Debian it installs the packages of SLURM, Chromium and
# Prometheus. Without them the last two parts, and the test of the alert rules, are skipped.
set -euo pipefail
unset CDPATH # with it cd may go elsewhere, and prints where

cd "$(dirname "${BASH_SOURCE[0]}")/.."
all=lint,unit,ranks,slurm,browser
parts=${PARTS:-$all}
quick=false
usage() { echo "test.sh: $1; use --parts with some of $all,nightly,gpu_stub, --unit or --quick" >&2; exit 2; }
while [ $# -gt 0 ]; do
    case $1 in
    --parts) [ $# -gt 1 ] || usage "--parts needs a list"; parts=$2; shift ;;
    --unit) parts=lint,unit ;;
    --quick) parts=lint,unit quick=true ;;
    *) usage "unknown option '$1'" ;;
    esac
    shift
done
for part in ${parts//,/ }; do
    case ",$all,nightly,gpu_stub," in *",$part,"*) ;; *) usage "unknown part '$part'" ;; esac
done
has() { case ",$parts," in *",$1,"*) true ;; *) false ;; esac; }

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

# One after another: two calls of apt-get would wait for each other's lock.
install_all_packages() {
    if has unit; then install_packages promtool prometheus; fi
    if has slurm; then install_packages "slurmctld slurmd sbatch" slurmctld slurmd slurm-client; fi
    # A driver goes with one version of the browser: by name both.
    if has browser; then install_packages chromedriver chromium chromium-driver; fi
}

install_all_packages &
python=$(bash scripts/setup_env.sh dev)
wait
PATH=$(cd "$(dirname "$python")" && pwd):$PATH
# What some hundred processes import is compiled once.
unset PYTHONDONTWRITEBYTECODE
export PATH OMP_NUM_THREADS=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)))')
logs=$(mktemp -d)
lanes=()
finish() {
    # A lane leads a process group of its own, with all that it has started.
    for lane in ${lanes[@]+"${lanes[@]}"}; do kill -- "-$lane" 2>/dev/null || true; done
    rm -rf "$logs"
}
trap finish EXIT

# One group. Its output is shown when it fails; otherwise its last line, and the tests it skipped.
group() {
    local title=$1 begin=$SECONDS log
    shift
    log=$(mktemp "$logs/XXXXXX")
    if "$@" </dev/null >"$log" 2>&1; then
        grep '^SKIPPED' "$log" || true
        echo "== $title ok, $((SECONDS - begin)) s: $(tail -n 1 "$log")"
    else
        { cat "$log"; echo "== $title FAILED after $((SECONDS - begin)) s: $*"; } >"$log.failed"
        cat "$log.failed"
        return 1
    fi
}

# Groups one after another, beside other lanes. The first that fails ends its lane.
lane() {
    set -m
    (set -e; "$1") &
    lanes+=($!)
    set +m
}

# Fails on a link that leads nowhere, and on whatever a page would fetch from another host.
build_docs() {
    local site=$logs/site
    # Not --quiet: it would silence what --strict counts. The theme's note on its future is no error.
    NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict --site-dir "$site"
}

# Files of tests on ranks, the long ones that are named first, so that no worker ends long after the
# others. Beside a folder pytest would forget that order.
rank_files() {
    { printf 'tests/distributed/test_%s.py\n' "$@"; ls tests/distributed/test_*.py; } |
        awk '!seen[$0]++'
}

# Files of rank tests of the extras that have changed, or of all. A change of what they hook into
# shows in their unit tests, and at night in these.
extra_rank_files() {
    local changed extra
    if has nightly; then
        ls tests/extras/*/test_ranks_*.py 2>/dev/null || true
        return
    fi
    changed=$(git log --since="@$(($(git log -1 --format=%ct) - 14400))" --name-only --format=) ||
        changed=common/extras.py
    if grep -qE '/(extras|step_feature)\.py$' <<<"$changed"; then
        ls tests/extras/*/test_ranks_*.py 2>/dev/null || true
        return
    fi
    for extra in $(grep -oE 'extras/[a-z_]+/' <<<"$changed" | cut -d/ -f2 | sort -u); do
        ls "tests/extras/$extra"/test_ranks_*.py 2>/dev/null || true
    done
}

tests() { python -m pytest -q -rs "$@"; }
parallel() { tests -n "$cores" "$@"; }

# Tests that wait more than they compute: for a daemon, a browser, a time-out. Ranks that wait for
# one another leave room for those of a second file.
waiting_lane() {
    if $quick; then group "four ranks" tests tests/distributed/test_walk.py; fi
    if has slurm; then group "tests on SLURM" tests -m slurm tests/slurm tests/extras; fi
    if has browser; then group "tests in a browser" tests tests/browser; fi
    if has ranks; then
        group "ranks that wait" parallel --dist loadfile --no-loadscope-reorder \
            -m "waits and not nightly" $(rank_files relayout_faults faults local_cpu)
    fi
    if has nightly; then
        group "nightly ranks that wait" parallel --dist loadfile -m "waits and nightly" \
            tests/distributed
    fi
    ranks_of_extras l "ranks of extras that wait"
}

# Those of the extras whose files do have the mark `waits` (l) or do not (L).
ranks_of_extras() {
    local files
    files=$(extra_rank_files)
    if [ -z "$files" ] || ! { has ranks || has nightly; }; then return 0; fi
    # shellcheck disable=SC2086
    files=$(grep -"$1" 'mark\.waits' $files || true)
    # shellcheck disable=SC2086
    [ -z "$files" ] || group "$2" parallel --dist loadfile -m "distributed and not alone" $files
}

# What the newest megatron-core may change without an error, on its own code beside the pinned one;
# "all" adds what is nightly, and what costs minutes and has not differed since 0.16.
newest_core() {
    local beside more=() marked="not waits and not alone and not nightly"
    if python -c 'from megatron.trainer.common.core_version import since; exit(not since("0.19"))'; then
        echo "this environment has it"
        return
    fi
    if [ "${1:-}" = all ]; then
        marked="not waits and not alone"
        more=(tests/unit/test_moe.py tests/distributed/test_resume.py tests/distributed/test_layouts.py
            tests/distributed/test_moe.py)
        for name in generate convert; do
            [ ! -d "tests/extras/$name" ] || more+=("tests/extras/$name")
        done
    fi
    beside=$(python -m tests.newest_core.prepare)
    # Muon of the pinned one is another.
    PYTHONPATH=$PYTHONPATH:$beside parallel --dist loadfile -m "$marked" \
        tests/unit/test_private_names.py tests/unit/test_newest_core.py tests/unit/test_restore.py \
        tests/distributed/test_noise.py tests/distributed/test_relayout.py \
        tests/newest_core/test_same_losses.py tests/guest \
        $(ls tests/extras/muon/test_muon.py 2>/dev/null) $(extra_rank_files | grep /muon/) \
        ${more[@]+"${more[@]}"}
}

# torch's CUDA build on libraries that stand in for CUDA's.
on_gpu_stub() {
    bash tests/gpu_stub/setup.sh >/dev/null && tests tests/gpu_stub
}

computing_lane() {
    if has unit; then group "unit tests" parallel tests/unit tests/extras -m unit; fi
    if has ranks; then
        group "the newest megatron-core" newest_core
        group "ranks that compute" parallel --dist loadfile --no-loadscope-reorder \
            -m "not waits and not alone and not nightly" \
            $(rank_files relayout moe context layouts noise features megatron_commands \
                quickstart installed commands memory controller)
    fi
    ranks_of_extras L "ranks of extras"
    if has nightly; then
        group "nightly ranks that compute" parallel --dist loadfile \
            -m "nightly and not waits and not alone" tests/distributed
        group "all tests on the newest megatron-core" newest_core all
    fi
    if has nightly || has gpu_stub; then group "CUDA on a stub" on_gpu_stub; fi
}

reading_lane() {
    group "pyright" pyright
    group "documentation" build_docs
}

if has lint; then
    group "ruff check" ruff check .
    group "ruff format" ruff format --check .
    group "import layers" lint-imports
fi
lane waiting_lane
lane computing_lane
if has lint; then lane reading_lane; fi
failed=0
for lane in ${lanes[@]+"${lanes[@]}"}; do wait "$lane" || failed=1; done
if has nightly && [ $failed = 0 ]; then
    # They time links and steps: nothing else runs.
    # shellcheck disable=SC2046
    group "ranks that are timed" tests -m alone tests/distributed $(extra_rank_files) || failed=1
fi
if [ $failed = 1 ]; then
    # Once more at the end, below whatever the other lanes have said since.
    cat "$logs"/*.failed
    echo "== FAILED after $SECONDS s"
    exit 1
fi
echo "== all passed: $parts, $SECONDS s"
