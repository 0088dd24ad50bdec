"""`python -m openrlhf.cli.train_ppo`: RL on this machine, alone or under `deepspeed --module`,
where the first process runs.
"""

from openrlhf.cli.common import command

main = command("train_ppo", __name__)
