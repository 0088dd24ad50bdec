"""`python -m openrlhf.cli.train_ppo_ray`: reinforcement learning; alone (starts Ray itself), or as a Ray job."""

from openrlhf.cli.common import one_process
from openrlhf.config.ppo import PPOConfig

main = one_process(PPOConfig, "train_ppo_ray", "openrlhf.launch.start:run_ppo")

if __name__ == "__main__":
    main()
