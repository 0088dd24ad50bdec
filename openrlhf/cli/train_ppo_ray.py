"""`python -m openrlhf.cli.train_ppo_ray`: reinforcement learning; alone (starts Ray itself), or as a Ray job."""

from openrlhf.cli.common import ray_command
from openrlhf.config.ppo import PPOConfig

main = ray_command(PPOConfig, "train_ppo_ray", "openrlhf.launch.start:run_ppo")

if __name__ == "__main__":
    main()
