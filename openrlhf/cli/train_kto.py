"""`python -m openrlhf.cli.train_kto`: KTO; alone, or under `deepspeed --module` or `torchrun -m`."""

from openrlhf.cli.common import offline_command
from openrlhf.config.supervised import KTOConfig

main = offline_command(KTOConfig, "kto")

if __name__ == "__main__":
    main()
