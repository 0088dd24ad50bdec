"""`python -m openrlhf.cli.train_kd`: knowledge distillation; alone, or under `deepspeed --module` or `torchrun -m`."""

from openrlhf.cli.common import offline_command
from openrlhf.config.supervised import KDConfig

main = offline_command(KDConfig, "kd")

if __name__ == "__main__":
    main()
