"""Does B8's larger static batch win by its size, or by the learning rate that goes with it?

    sudo python bench/time_to_loss_real.py --links 0 --policies static_4 --lr 7.0711e-4 \\
        --output docs/results/time_to_loss_rate.json
    python bench/time_to_loss_rate.py

The first trains the first batch at the rate of the one that is twice as large. The second gives
these runs the clock of B8's runs of that batch, because a rate does not change what a step takes,
and says what both save over it. Writes `time_to_loss_rate.saved.json`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from support import RESULTS, open_source, origin
from time_to_loss import curve_of, saved, savings_line, summary, targets, times
from time_to_loss_policies import MARK, STATIC, Recipe, is_static
from time_to_loss_timed import with_timed

_TARGETS = 5


def clocked_as(run: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A run with the seconds that another had after as many samples."""
    pairs = list(zip(run["evaluations"], other["evaluations"], strict=True))
    if any(own[0] != its[0] for own, its in pairs):
        raise SystemExit("these runs were not evaluated after the same samples")
    return {**run, "evaluations": [(own[0], its[1], own[2]) for own, its in pairs]}


def main() -> int:
    """Prints and writes."""
    open_source()
    result = json.loads((RESULTS / "time_to_loss_real.json").read_text())
    faster = json.loads((RESULTS / "time_to_loss_rate.json").read_text())
    settings = result["settings"]["recipe"]
    recipe = Recipe(**{**settings, "batches": tuple(settings["batches"])})
    rate = faster["settings"]["recipe"]["lr"]
    first, larger = f"{STATIC}_{recipe.first_batch}", f"{STATIC}_{2 * recipe.first_batch}"
    raised = f"{first} at the rate of {larger}"
    runs = [{**r, "policy": r["policy"].rstrip(MARK)} for r in with_timed(result, recipe)]
    statics: dict[str, list[Any]] = {}
    for run in runs:
        if is_static(run["policy"]):
            statics.setdefault(run["policy"], []).append(curve_of(run))
    goals = targets(statics, _TARGETS)
    links: dict[str, Any] = {}
    print(f"learning rates {recipe.lr:g} and {rate:g}")
    for link in result["links"]:
        own = {r["seed"]: r for r in runs if r["link"] == link and r["policy"] == first}
        added = [
            {**clocked_as(r, own[r["seed"]]), "policy": raised}
            for r in faster["runs"]
            if r["policy"] == first and r["seed"] in own
        ]
        found = times([*(r for r in runs if r["link"] == link), *added], goals)
        links[link] = {}
        for name in (raised, larger):
            rows = saved(found, name, first)
            print(f"link {link}: {savings_line(name, rows, f'saves over {first}')}")
            links[link][name] = {"targets": rows, **(summary(rows) or {})}
    record = {"what": "B8's larger batch and its rate", "goals": goals, "links": links, **origin()}
    (RESULTS / "time_to_loss_rate.saved.json").write_text(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
