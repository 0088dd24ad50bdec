"""`python -m openrlhf.cli.train_rm`: a reward model from pairs; alone, or under `deepspeed --module` or `torchrun -m`."""

from openrlhf.cli.common import offline_command
from openrlhf.config.supervised import RMConfig

main = offline_command(RMConfig, "rm")

if __name__ == "__main__":
    main()
