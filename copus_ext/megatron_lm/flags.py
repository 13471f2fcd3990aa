"""The controller's flags, for a checkout's parser and for help without a checkout."""

from __future__ import annotations

from typing import Any

from copus_ext.controller.flags import CopusConfig
from megatron.trainer.config.fields import option_specs


def add_copus_args(parser: Any) -> Any:
    """Adds the controller's flags to the checkout's parser: an `extra_args_provider`."""
    section = parser.add_argument_group("copus controller")
    for spec in option_specs(CopusConfig):
        if spec.in_file is not None:
            parser.set_defaults(**{spec.dest: spec.default})
            continue
        settings: dict[str, Any] = {"dest": spec.dest, "help": spec.help.replace("%", "%%")}
        if spec.kind is bool:
            settings |= {"action": "store_true"}
        else:
            settings |= {"type": spec.kind, "default": spec.default, "choices": spec.choices}
        section.add_argument(*spec.strings, **settings)
    return parser
