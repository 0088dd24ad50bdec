"""`python -m openrlhf.cli.train_ppo`: RL on this machine, alone or under `deepspeed --module`, where the first process runs."""

from openrlhf.cli.common import ray_command
from openrlhf.config.local_ppo import LocalPPOConfig

main = ray_command(LocalPPOConfig, "train_ppo", "openrlhf.launch.start:run_ppo")

if __name__ == "__main__":
    main()
