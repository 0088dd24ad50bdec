"""`python -m openrlhf.cli.train_prm`: process reward model; alone, or under `deepspeed --module` or
`torchrun -m`.
"""

from openrlhf.cli.common import command

main = command("prm", __name__)
