"""`python -m openrlhf.cli.train_sft`: supervised fine-tuning; alone, or under `deepspeed --module`
or `torchrun -m`.
"""

from openrlhf.cli.common import command

main = command("sft", __name__)
