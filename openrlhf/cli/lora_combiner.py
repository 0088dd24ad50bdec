"""`python -m openrlhf.cli.lora_combiner`: merge an adapter into its base model."""

from openrlhf.cli.common import one_process
from openrlhf.config.combining import CombinerConfig

main = one_process(CombinerConfig, "lora_combiner", "openrlhf.checkpoints.combine:combine", on_ray=False)

if __name__ == "__main__":
    main()
