"""`python -m openrlhf.cli.train_ppo_ray`: reinforcement learning; alone (starts Ray itself), or as
a Ray job.
"""

from openrlhf.cli.common import command

main = command("ppo", __name__)
