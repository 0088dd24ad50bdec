"""`python -m openrlhf.cli.train_kd`: knowledge distillation; alone, or under `deepspeed --module`
or `torchrun -m`.
"""

from openrlhf.cli.common import command

main = command("kd", __name__)
