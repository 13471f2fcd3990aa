#!/usr/bin/env bash
# A throw-away SLURM cluster on one machine: pretend nodes with pretend GPUs; no cgroups, no munge,
# no database.
#
#   slurm_dev.sh up [nodes=4] [gpus=8]   start it and wait until every node is idle (about a second)
#   eval "$(slurm_dev.sh env)"           the export that every SLURM client needs
#   slurm_dev.sh status                  nodes, jobs and the daemons' pids
#   slurm_dev.sh kill-node n2            lose a node at once: its slurmd and its job steps get KILL
#   slurm_dev.sh start-node n2           bring it back
#   slurm_dev.sh down                    cancel the jobs, stop every daemon, delete the directory
#   slurm_dev.sh selftest                up, srun, sbatch, down; non-zero if anything is left behind
#
# Needs SLURM 22.05 or later (Debian: apt-get install slurmctld slurmd slurm-client) and root.
# Environment:
#   SLURM_DEV_ROOT   directory of this cluster (default: slurm-dev under TMPDIR); with another root
#                    and port there can be another cluster
#   SLURM_DEV_PORT   first TCP port (default 17000); uses nodes + 1 ports on loopback
#   SLURM_DEV_EXTRA  file appended to slurm.conf (another partition, PreemptMode, RequeueExit ...)
#
# It trusts everybody (auth/none): for loopback alone. It ends nothing but its own daemons and their
# steps, by pid.
set -euo pipefail

ROOT=${SLURM_DEV_ROOT:-${TMPDIR:-/tmp}/slurm-dev}
BASE=${SLURM_DEV_PORT:-17000}
MARK=$ROOT/.slurm-dev
export SLURM_CONF=$ROOT/etc/slurm.conf

fail() {
    echo "slurm_dev: $*" >&2
    exit 1
}

# False also for a zombie: in a container without an init nobody reaps a daemon.
running() { grep -q '^State:[[:space:]]*[^ZX]' "/proc/$1/status" 2>/dev/null; }
gone() { ! running "$1"; }

# A pid counts as ours only while it is the daemon that its pid file names.
alive() { # pid-file
    local pid daemon
    pid=$(cat "$1" 2>/dev/null) && [ -n "$pid" ] && running "$pid" || return 1
    daemon=$(basename "$1")
    [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "${daemon%%.*}" ]
}

any_alive() {
    local file
    for file in "$ROOT"/run/*.pid; do alive "$file" && return 0; done
    return 1
}

await() { # tries command...; looks every 50 ms
    local tries=$1
    shift
    for _ in $(seq "$tries"); do
        "$@" && return 0
        sleep 0.05
    done
    return 1
}

write_conf() { # nodes gpus
    local host gres=""
    host=$(hostname -s)
    if [ "$2" -gt 0 ]; then gres="Gres=gpu:$2"; fi
    cat >"$ROOT/etc/slurm.conf" <<CONF
ClusterName=dev
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$BASE
SlurmUser=root
SlurmdUser=root
# trusts every client: loopback only
AuthType=auth/none
CredType=cred/none
# %n keeps the daemons of the pretend nodes apart
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd.%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd.%n.log
# no cgroup plugin is ever loaded, so the host's cgroup version does not matter
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
# no database: sacct answers "disabled"; one text line per finished job stands in for it
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$ROOT/log/jobcomp.txt
# finished jobs stay visible to scontrol for 10 minutes; pending ones start within a second
MinJobAge=600
SchedulerParameters=sched_interval=1,bf_interval=1
# pmix is not installed; what it logs about that is noise
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# a small machine may claim many CPUs; a lost node is noticed in 30 s and may come back by itself
SlurmdParameters=config_overrides
SlurmdTimeout=30
ReturnToService=2
KillWait=5
GresTypes=gpu
NodeName=n[1-$1] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((BASE + 1))-$((BASE + $1))] \\
  CPUs=8 RealMemory=4096 $gres State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES PriorityTier=10 MaxTime=INFINITE State=UP
CONF
    if [ "$2" -gt 0 ]; then
        # slurmd insists on device files: a plain file or a bare Count= drains the node
        local last=$(($2 - 1)) i
        for i in $(seq 0 "$last"); do mknod "$ROOT/gpu/nvidia$i" c 1 3; done
        printf 'AutoDetect=off\nNodeName=n[1-%s] Name=gpu File=%s/gpu/nvidia[0-%s]\n' \
            "$1" "$ROOT" "$last" >"$ROOT/etc/gres.conf"
    fi
    if [ -n "${SLURM_DEV_EXTRA:-}" ]; then cat "$SLURM_DEV_EXTRA" >>"$ROOT/etc/slurm.conf"; fi
}

all_idle() { [ "$(sinfo -h -o '%T %D' 2>/dev/null | sort -u)" = "idle $1" ]; }

up() { # nodes gpus
    local tool n
    [[ $1 =~ ^[1-9][0-9]*$ && $2 =~ ^[0-9]+$ ]] || fail "up wants two numbers: nodes gpus"
    for tool in slurmctld slurmd sinfo srun; do
        command -v $tool >/dev/null ||
            fail "$tool not found: apt-get install slurmctld slurmd slurm-client"
    done
    [ "$(id -u)" = 0 ] || fail "needs root (mknod and slurmd)"
    [ ${#ROOT} -le 60 ] ||
        fail "SLURM_DEV_ROOT has more than 60 characters, too long for the daemons' sockets: $ROOT"
    any_alive && fail "a cluster is already up in $ROOT (slurm_dev.sh down)"
    if [ -e "$ROOT" ] && [ ! -e "$MARK" ] && [ -n "$(ls -A "$ROOT")" ]; then
        fail "$ROOT exists and is not a cluster of mine; choose another SLURM_DEV_ROOT"
    fi
    for n in $(seq 0 "$1"); do
        if (: <"/dev/tcp/127.0.0.1/$((BASE + n))") 2>/dev/null; then
            fail "port $((BASE + n)) is taken; set SLURM_DEV_PORT"
        fi
    done
    rm -rf "$ROOT"
    mkdir -p "$ROOT"/{etc,state,spool,log,run,gpu}
    : >"$MARK"
    for n in $(seq "$1"); do mkdir -p "$ROOT/spool/n$n"; done
    write_conf "$1" "$2"
    slurmctld -i -c # -c forgets old state
    for n in $(seq "$1"); do slurmd -N "n$n"; done
    if await 300 all_idle "$1"; then
        sinfo
        return
    fi
    { sinfo; sinfo -R; tail -n 5 "$ROOT"/log/*.log; } >&2 || true
    stop_daemons
    fail "the cluster did not come up; logs are in $ROOT/log"
}

# The slurmd and the slurmstepd of each running step: whoever holds the log of a node open.
node_daemons() { # node, or * for all
    local fd pid
    for fd in /proc/[0-9]*/fd/*; do
        # shellcheck disable=SC2053   # a pattern is meant
        if [[ $(readlink "$fd" 2>/dev/null) == "$ROOT"/log/slurmd.$1.log ]]; then
            pid=${fd#/proc/}
            echo "${pid%%/*}"
        fi
    done | sort -un
}

with_descendants() { # pid...
    local pid
    for pid in "$@"; do
        echo "$pid"
        # shellcheck disable=SC2046   # pids are meant to be split
        with_descendants $(cat /proc/"$pid"/task/*/children 2>/dev/null)
    done
}

# A dead node leaves no task that still trains.
kill_all_of() { # node, or * for all
    local pids
    # shellcheck disable=SC2046
    pids=$(with_descendants $(node_daemons "$1"))
    # shellcheck disable=SC2086
    if [ -n "$pids" ]; then kill -KILL $pids 2>/dev/null || true; fi
}

kill_node() { # node
    alive "$ROOT/run/slurmd.$1.pid" || fail "node $1 is not running"
    kill_all_of "$1"
    rm -f "$ROOT/run/slurmd.$1.pid"
}

start_node() { # node
    [ -d "$ROOT/spool/$1" ] || fail "no node $1 in $ROOT"
    alive "$ROOT/run/slurmd.$1.pid" && fail "node $1 is already running"
    slurmd -N "$1"
}

stop_daemons() {
    local file pid pids=""
    for file in "$ROOT"/run/*.pid; do
        if alive "$file"; then pids+=" $(cat "$file")"; fi
    done
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    for pid in $pids; do await 100 gone "$pid" || kill -KILL "$pid" 2>/dev/null || true; done
}

no_jobs() { [ -z "$(squeue -h 2>/dev/null)" ]; }

down() {
    if [ ! -e "$MARK" ]; then
        echo "nothing to stop in $ROOT"
        return
    fi
    if alive "$ROOT/run/slurmctld.pid"; then
        squeue -h -o %A 2>/dev/null | xargs -r scancel 2>/dev/null || true
        await 200 no_jobs || echo "slurm_dev: jobs did not end within 10 s" >&2
    fi
    stop_daemons
    kill_all_of '*'
    rm -rf "$ROOT"
}

status() {
    any_alive || fail "no cluster is up in $ROOT"
    sinfo -N -o '%N %T %G'
    squeue -o '%i %j %T %r %L %N %k'
    local file
    for file in "$ROOT"/run/*.pid; do
        if alive "$file"; then echo "$(basename "$file" .pid) $(cat "$file")"; fi
    done
}

selftest() {
    local got job task
    up 4 8 >/dev/null
    # shellcheck disable=SC2016   # the tasks expand it
    task='echo "$SLURM_PROCID/$SLURM_NTASKS on $SLURMD_NODENAME gpu $CUDA_VISIBLE_DEVICES"'
    got=$(srun -N2 -n4 --gpus-per-node=2 bash -c "$task" | sort)
    echo "$got"
    [ "$(wc -l <<<"$got")" = 4 ] || fail "srun did not run 4 tasks"
    job=$(sbatch --parsable -W -N2 --ntasks-per-node=1 -o "$ROOT/log/%j.out" --wrap 'srun hostname')
    [ "$(wc -l <"$ROOT/log/$job.out")" = 2 ] || fail "sbatch did not run 2 tasks"
    down
    if [ -e "$ROOT" ]; then fail "left $ROOT behind"; fi
    echo "selftest ok"
}

case ${1:-} in
    up) up "${2:-4}" "${3:-8}" ;;
    env) echo "export SLURM_CONF=$SLURM_CONF" ;;
    status | down | selftest) "$1" ;;
    kill-node) kill_node "${2:?which node}" ;;
    start-node) start_node "${2:?which node}" ;;
    *)
        sed -n '2,24s/^# \{0,1\}//p' "$0"
        exit 2
        ;;
esac
