"""Does the larger static batch win by its size, or by the learning rate that goes with it?

    sudo python -m bench.time_to_loss.real --links 0 --policies static_4 static_8 adaptive \\
        --lr 7.0711e-4 --output docs/results/time_to_loss_rate.json
    python -m bench.time_to_loss.learning_rate

The first trains the first batch at the rate of the one that is twice as large; two more policies
show what follows from there. The second gives its runs of the first batch the clock of the usual
runs, because a rate does not change what a step takes, and says what they and the larger batch save
over the first batch at its own rate. Writes docs/results/time_to_loss_rate.saved.json.
"""

from __future__ import annotations

import json
from typing import Any

from bench.support import RESULTS, arguments, origin, write
from bench.time_to_loss.clock import profiles_of, with_timed
from bench.time_to_loss.curves import saved, savings_line, summary, times
from bench.time_to_loss.policies import MARK, STATIC, Recipe
from bench.time_to_loss.report import goals_of


def clocked_as(run: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A run with the seconds that another had after as many samples."""
    pairs = list(zip(run["evaluations"], other["evaluations"], strict=True))
    assert all(own[0] == its[0] for own, its in pairs), "evaluated after other samples"
    return {**run, "evaluations": [(own[0], its[1], own[2]) for own, its in pairs]}


def main() -> None:
    """Prints and writes."""
    args = arguments(__doc__, "time_to_loss_rate.saved.json").parse_args()
    result = json.loads((RESULTS / "time_to_loss_real.json").read_text())
    faster = json.loads((RESULTS / "time_to_loss_rate.json").read_text())
    recipe = Recipe.of(result)
    first, larger = f"{STATIC}_{recipe.first_batch}", f"{STATIC}_{2 * recipe.first_batch}"
    raised = f"{first} at the rate of {larger}"
    runs = [
        {**run, "policy": run["policy"].rstrip(MARK)}
        for run in with_timed(result, recipe, profiles_of(result))
    ]
    goals, links = goals_of(runs, 5), {}
    for link in result["links"]:
        mine = [run for run in runs if run["link"] == link]
        own = {run["seed"]: run for run in mine if run["policy"] == first}
        added = [
            {**clocked_as(run, own[run["seed"]]), "policy": raised}
            for run in faster["runs"]
            if run["policy"] == first and run["seed"] in own
        ]
        found, links[link] = times([*mine, *added], goals), {}
        for name in (raised, larger):
            rows = saved(found, name, first)
            print(f"link {link}: {savings_line(rows, f'{name} saves over {first}')}")
            links[link][name] = {"targets": rows, **(summary(rows) or {})}
    record = {"what": "the larger batch and its rate", "goals": goals, "links": links, **origin()}
    write(args.output, record, hide=["links"])


if __name__ == "__main__":
    main()
