"""Plans a training command's memory and speed: `openrlhf plan COMMAND --cluster CLUSTER [flags]`.

The only model files that the command reads are config.json and, if necessary, the headers of the
weight files.
"""

from collections.abc import Sequence

from openrlhf.cli.common import HELP_FLAGS, single_process_command, words_of
from openrlhf.config.flags import flags_of
from openrlhf.config.planning import PlanConfig


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the flags in `argv` (default: this process's arguments) and print the plan."""
    own, planned = split(words_of(argv))
    with single_process_command(PlanConfig, own, command="plan") as config:
        from openrlhf.launch.plan_command import print_plan

        print_plan(config, planned)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate this command's own arguments from the arguments of the planned command."""
    names = {flag.name for flag in flags_of(PlanConfig).values()} - {"--plugin"}
    own: list[str] = []
    planned: list[str] = []
    rest = list(words)
    if rest and not rest[0].startswith("-"):
        own = ["--command", rest.pop(0)]
    part = planned
    for word in rest:
        if word.partition("=")[0] in names | HELP_FLAGS:
            part = own
        elif word.startswith("-"):
            part = planned
        part.append(word)
    return own, planned


if __name__ == "__main__":
    main()
