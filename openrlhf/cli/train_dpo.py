"""`python -m openrlhf.cli.train_dpo`: direct preference optimization; alone, or under `deepspeed --module` or `torchrun -m`."""

from openrlhf.cli.common import offline_command
from openrlhf.config.supervised import DPOConfig

main = offline_command(DPOConfig, "dpo")

if __name__ == "__main__":
    main()
