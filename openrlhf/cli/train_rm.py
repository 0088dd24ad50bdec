"""`python -m openrlhf.cli.train_rm`: a reward model from pairs; alone, or under `deepspeed
--module` or `torchrun -m`.
"""

from openrlhf.cli.common import command

main = command("rm", __name__)
