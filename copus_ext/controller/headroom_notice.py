"""Tells the user what there is to gain: when a run starts, and once its noise scale is known."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from copus_ext.goodput import headroom
from copus_ext.goodput.headroom import Headroom, Prior
from copus_ext.goodput.inputs import ConfigThroughput, DecisionInputs

logger = logging.getLogger(__name__)


class HeadroomNotice:
    """Prints a line at the start of a launch, and another when the noise scale is known. An error
    is only a warning."""

    def __init__(self) -> None:
        self._said = ""

    def at_start(
        self, rows: Callable[[], tuple[Sequence[ConfigThroughput], int]], prior: Prior | None
    ) -> Headroom | None:
        """The headroom before the first step of a launch; None if it is unknown.

        Args:
            rows: gives the configurations to choose from and the index of the present one.
            prior: of the critical batch size.
        """
        return self._say(lambda: headroom.of_rows(*rows(), prior))

    def at_decision(self, inputs: DecisionInputs) -> Headroom | None:
        """The headroom as of a decision; None if it is unknown."""
        return self._say(lambda: headroom.of_inputs(inputs))

    def _say(self, find: Callable[[], Headroom | None]) -> Headroom | None:
        try:
            found = find()
        except Exception as error:
            logger.warning("what there is to gain is unknown: %r", error)
            return None
        if found is not None and self._said not in (found.source, "measured"):
            self._said = found.source
            print(f"copus: {found}", flush=True)
        return found
