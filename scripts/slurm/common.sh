# For the batch scripts beside this one: where the repository is and which python runs it.
# Sourced on the first node of a job; `root` is set before, `python` after it.

refuse() {
    echo "${SLURM_JOB_NAME:-job}: $*" >&2
    exit 2
}

if [ -n "${COPUS_USE_PYTHON:-}" ]; then
    python=$COPUS_USE_PYTHON
else
    venv=${COPUS_VENV:-$root/.venv}
    # Many tasks of an array at once must not make it.
    if [ -n "${SLURM_ARRAY_TASK_ID:-}" ] && [ ! -x "$venv/bin/python" ]; then
        refuse "there is no environment in $venv; run: bash scripts/setup_env.sh run"
    fi
    python=$(bash "$root/scripts/setup_env.sh" run) || exit
fi
command -v "$python" >/dev/null || refuse "there is no python $python on this node"
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# srun of SLURM 22.05 and later does not look at what sbatch was given.
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi
