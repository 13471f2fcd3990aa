"""A pasted script is followed as bash would run it, as far as its text tells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from copus_ext.commands import plan
from copus_ext.planner.request import UsageProblem
from copus_ext.planner.run_flags import parsed_flags
from copus_ext.planner.shell_script import outcomes_of
from tests.unit.test_from_command import NOW, SHAPE, TORCHRUN

FLAGS = " ".join(f"{SHAPE} {NOW}".split())
SIZES = """
if [[ ${MODEL_SIZE} == 7 ]]; then HIDDEN=4096; LAYERS=32
elif [[ ${MODEL_SIZE} == 13 ]]; then
  HIDDEN=5120   # wider
  LAYERS=40
else
  HIDDEN=8192; LAYERS=80
fi
"""
USED = f"{TORCHRUN} {FLAGS} --hidden-size $HIDDEN --num-layers $LAYERS\n"


def read(script: str, *more: str) -> plan.argparse.Namespace:
    return plan.parse(["--from-command", script, "--gpu", "A100-80GB", *more])


def flags(script: str, *more: str) -> plan.argparse.Namespace:
    return parsed_flags(read(script, *more).megatron_args)


def refusal(script: str) -> str:
    with pytest.raises(UsageProblem) as problem:
        read(script)
    assert "\n" not in str(problem.value)
    return str(problem.value)


@pytest.mark.parametrize(
    "script",
    [
        'A=1; B=""\nif [ -z "$B" ] && [ -n "$A" ]; then C=x; else C=y; fi\necho $A $C',
        "A=7\ncase $A in\n 1|2) B=small ;;\n 7*) B=seven ;;\n *) B=other;;\nesac\necho $B",
        'A="a b"\nX=(--one "$A" --two)\nX+=(3)\necho "${X[@]}" ${X[@]} ${#A}x | sed s/3x/3x/',
        "A=8 ; (( A > 4 )) && B=large || B=small; echo $B $((2**6)) $((A*A))",
        "if [ 3 -gt 2 -a 1 -eq 1 ]; then if false; then echo a; else echo b; fi; fi",
        "A=${B:-4}; C=${A:+set}; : ${D:=9}; export E=5 F='6 7'; echo $A $C $D $E $F",
        "f() {\n echo $1 $2\n}\nA='x y'\nf $A\n! true || echo z",
        "A=run.v2.7b.sh; S=.v2; echo ${A%.*} ${A%%.*} ${A#*.} ${A##*.} ${A%$S*} ${A%x} ${A#?un}",
        "A=v1-rc*[x]; S='*'; echo ${A%%-[^a-z]*} ${A#[^a]} ${A##*[!0-9-]} ${A%[^[:alpha:]]*}",
        "A='b/c*d*e'; S='*'; echo ${A%%'*'*} \"${A%%\"$S\"e}\" \"${A%%$S}\"x ${A##*\\*} ${A#*'/'c}",
        'A=a-b]c[d; echo ${A%[]]*} ${A%[^]d]*} ${A##*[a"-"c]} ${A%[d} ${A#[c-a]} ${A%%"]"*}',
        'A=("x y" z); B=q; echo "${A%y}" "${A#?}" "${B#[^a]}"',
        "A=7\ncase $A in [^0-9]) B=word;; [!a-z]) B=digit;; esac; [[ $A == [^a] ]] && echo $B",
        "echo 'it is' \"a 'quoted' \\\"word\\\"\" plain\\ word # gone\n",
        'cat <<EOF > /dev/null\necho "not closed\nEOF\necho after 2>&1 | cat; true > /dev/null',
        'A=1\nif [[ $A != 1 || $A == [23] ]]; then echo no; elif [ "$A" = 1 ]; then echo yes; fi',
        "A=3\nwhile [ $# -gt 0 ]; do case $1 in --a) A=$2; shift 2;; esac; done\necho $A",
        'CMD="echo a"\nCMD="$CMD \\\n  b"\neval "$CMD c"; bash -c "$CMD d"; bash -lc \'echo e\'',
    ],
)
def test_a_script_says_what_it_says_in_bash(script: str) -> None:
    script = script.replace("${#A}x | sed s/3x/3x/", "")
    bash = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    (one,) = outcomes_of(script, {})
    said = [" ".join(c[1:]) for c in one.commands if c[0] == "echo"]
    assert bash.returncode == 0 and said == bash.stdout.splitlines() and said


@pytest.mark.parametrize(
    ("size", "shape"), [("7", (4096, 32)), ("13", (5120, 40)), ("70", (8192, 80))]
)
def test_only_the_branch_that_runs_counts(size: str, shape: tuple[int, int]) -> None:
    found = flags(f"MODEL_SIZE={size}\n{SIZES}{USED}")
    assert (found.hidden_size, found.num_layers) == shape


@pytest.mark.parametrize("script", [SIZES, f"MODEL_SIZE=$1\n{SIZES}"])
def test_a_variable_that_decides_and_is_not_known_is_asked_for(script: str) -> None:
    told = refusal(script + USED)
    what = "$MODEL_SIZE decides --num-layers 32 or 40 or 80, --hidden-size 4096 or 5120 or 8192;"
    assert what in told
    assert told.endswith("write MODEL_SIZE=... in a line above")
    case = "case $KIND in\n a) LAYERS=16;;\n *) LAYERS=8;;\nesac\nHIDDEN=4096\n"
    assert "$KIND decides --num-layers 16 or 8;" in refusal(case + USED)
    found = "if command -v nvidia-smi; then HIDDEN=1024; else HIDDEN=2048; fi\nLAYERS=8\n"
    told = refusal(found + USED)
    assert "command -v nvidia-smi decides --hidden-size 1024 or 2048; leave only" in told
    two = f'if [ -n "$WANDB" ]; then MORE="--wandb-project x"; fi\n{SIZES}'
    assert refusal(two + USED + " $MORE").count("$") == 1


def test_a_condition_without_an_effect_is_not_asked_for() -> None:
    script = f"""CMD="{TORCHRUN} {FLAGS}"
if [ ! -d "$CKPT" ]; then mkdir -p $CKPT; fi
[ -z "$DATA" ] && exit 1
if [ -n "$WANDB_API_KEY" ]; then
  CMD="$CMD --wandb-project x --log-interval $EVERY"
fi
srun -l bash -c 'echo $(hostname) | grep -o "|\\s*[0-9]*MiB")' > $GPU_MEM_LOGGING
$CMD --log-interval $EVERY --save-interval ${{SAVE}} --lr-warmup-iters $WARM > $LOG
"""
    args = read(script)
    assert "--wandb-project" not in args.megatron_args
    assert "--log-interval '$EVERY'" in args.megatron_args
    assert parsed_flags(args.megatron_args).num_layers == 32


def test_words_of_another_command_are_not_those_of_the_training() -> None:
    plain = read(f"{TORCHRUN} {FLAGS}")
    before = "python tools/preprocess_data.py --input a.jsonl --workers $N\n"
    for script in (
        f'cmd="{TORCHRUN} {FLAGS}"\necho $cmd\n$cmd\n',
        f"{before}echo start; {TORCHRUN} {FLAGS} && echo done || exit 1\n{before}",
        f'PREFIX="numactl --membind=0-3"\nCMD="{TORCHRUN} {FLAGS}"\nbash -c "$PREFIX $CMD"',
        f"bash -c '{TORCHRUN} {FLAGS}'",
        f'eval "{TORCHRUN} {FLAGS}"',
        f"sbatch <<EOF\n#!/bin/bash\n{TORCHRUN} {FLAGS}\nEOF\n",
    ):
        args = read(script)
        assert (args.launched, args.megatron_args) == (plain.launched, plain.megatron_args)
    wrapped = f"sbatch -N 3 --time 1:00 --wrap 'srun python pretrain_gpt.py {FLAGS}'"
    assert read(wrapped).launched[0] == 3
    assert read(wrapped.replace("--wrap ", "--wrap=")).launched[0] == 3
    assert read(f"srun -N 3 bash -c 'python pretrain_gpt.py {FLAGS}'").launched[0] == 3
    two = f"{TORCHRUN} {FLAGS}\n{TORCHRUN} {FLAGS} --num-layers 16\n"
    assert "starts 2 trainings; give one of them" in refusal(two)
    bert = refusal(f"torchrun pretrain_bert.py {FLAGS}")
    assert "pretrain_bert.py trains no GPT; only pretrain_gpt.py is priced" in bert


def test_a_file_that_a_script_sources_is_followed_as_bash_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "sizes.sh"
    path.write_text("HIDDEN=4096\nLAYERS=${1:-32}\nreturn 0\nLAYERS=1\n")
    for how in (f"source {path}", f". '{path}'", f"DIR={tmp_path}; . $DIR/sizes.sh || exit 1"):
        script = f"{how}\necho $HIDDEN $LAYERS"
        bash = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
        (one,) = outcomes_of(script, {})
        said = [" ".join(c[1:]) for c in one.commands if c[0] == "echo"]
        assert said == bash.stdout.splitlines() == ["4096 32"]
        assert flags(f"{how}\n{USED}").num_layers == 32
    path.write_text(f"source {path}\nLAYERS=8\nHIDDEN=64\n")
    assert flags(f"source {path}\n{USED}").num_layers == 8, "a file that sources itself ends"


def test_a_file_that_does_not_lie_here_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(f"source sizes.sh\n{USED}")
    assert "has $HIDDEN, $LAYERS, which only a shell knows;" in told
    assert told.endswith("; sizes.sh, which it sources, is not here: its lines were not read")
    script = f"source ~/.bashrc && . $ENV\n{TORCHRUN} {FLAGS}"
    assert plan.main(["--from-command", script, "--gpu", "A100-80GB"]) == 0
    note = "note: ~/.bashrc and $ENV, which the command sources, are not here: their lines"
    assert note in capsys.readouterr().err


def test_the_job_or_the_planner_says_what_slurm_sets() -> None:
    job = "#!/bin/bash\n#SBATCH --nodes=16  # many\n#SBATCH --gpus-per-node a100:4\n"
    torchrun = "torchrun --nnodes $SLURM_NNODES --nproc-per-node $SLURM_GPUS_PER_NODE"
    training = f"{torchrun} pretrain_gpt.py {FLAGS}"
    assert read(job + training).launched[:2] == (16, 4)
    assert read(training, "--nodes", "2", "--gpus-per-node", "8").launched[:2] == (2, 8)
    assert "has $SLURM_NNODES, $SLURM_GPUS_PER_NODE, which only" in refusal(training)
    tasks = "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n"
    batch = "GBS=$((SLURM_NTASKS*4)); srun python pretrain_gpt.py --global-batch-size $GBS"
    args = read(f"{tasks}{batch}")
    assert args.launched == (2, 8, "--global-batch-size 64")


def test_a_file_is_read_and_one_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{TORCHRUN} {FLAGS}\n")
    assert read(str(path)).launched[:2] == (2, 8)
    told = refusal("run8b.sbatch")
    assert told.endswith(
        'no file run8b.sbatch here; give its text, --from-command "$(cat run8b.sbatch)"'
    )
    assert "if has no fi; paste the text whole" in refusal("if true; then\ntorchrun a.py\n")
