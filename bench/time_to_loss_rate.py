"""Does B8's larger static batch win by its size, or by the learning rate that goes with it?

    sudo python bench/time_to_loss_real.py --links 0 --policies static_4,static_8,adaptive \\
        --lr 7.0711e-4 --output docs/results/time_to_loss_rate.json
    python bench/time_to_loss_rate.py

The first trains the first batch at the rate of the one that is twice as large; two more policies
show what follows from there. The second gives its runs of the first batch the clock of B8's,
because a rate does not change what a step takes, and says what they and the larger batch save over
B8's first batch. Writes `time_to_loss_rate.saved.json`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from support import RESULTS, open_source, origin
from time_to_loss import saved, savings_line, summary, times
from time_to_loss_policies import MARK, STATIC, Recipe
from time_to_loss_report import goals_of
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
    goals = goals_of(runs, _TARGETS)
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
