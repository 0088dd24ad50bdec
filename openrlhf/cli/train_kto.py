"""`python -m openrlhf.cli.train_kto`: KTO; alone, or under `deepspeed --module` or `torchrun -m`."""

from openrlhf.cli.common import command

main = command("kto", __name__)
