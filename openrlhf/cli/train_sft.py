"""`python -m openrlhf.cli.train_sft`: supervised fine-tuning; alone, or under `deepspeed --module` or `torchrun -m`."""

from openrlhf.cli.common import offline_command
from openrlhf.config.supervised import SFTConfig

main = offline_command(SFTConfig, "sft")

if __name__ == "__main__":
    main()
