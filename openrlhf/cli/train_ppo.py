"""`python -m openrlhf.cli.train_ppo`: RL on this machine, alone or under `deepspeed --module`, where the first process runs."""

from openrlhf.cli.common import one_process
from openrlhf.config.local_ppo import LocalPPOConfig

main = one_process(LocalPPOConfig, "train_ppo", "openrlhf.launch.start:run_ppo")

if __name__ == "__main__":
    main()
