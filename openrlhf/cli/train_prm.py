"""`python -m openrlhf.cli.train_prm`: process reward model; alone, or under `deepspeed --module` or `torchrun -m`."""

from openrlhf.cli.common import offline_command
from openrlhf.config.supervised import PRMConfig

main = offline_command(PRMConfig, "prm")

if __name__ == "__main__":
    main()
