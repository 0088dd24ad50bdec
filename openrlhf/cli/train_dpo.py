"""`python -m openrlhf.cli.train_dpo`: direct preference optimization; alone, or under `deepspeed
--module` or `torchrun -m`.
"""

from openrlhf.cli.common import command

main = command("dpo", __name__)
