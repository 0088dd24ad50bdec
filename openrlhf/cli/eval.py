"""`python -m openrlhf.cli.eval`: pass@k of a checkpoint, accuracy of a reward model, or win rate
against another.
"""

from openrlhf.cli.common import command

main = command("eval", __name__)
