"""`python -m openrlhf.cli.interactive_chat`: a conversation with a model."""

from openrlhf.cli.common import one_process
from openrlhf.config.inference import ChatConfig

main = one_process(ChatConfig, "interactive_chat", "openrlhf.evaluation.chat:run_chat", on_ray=False)

if __name__ == "__main__":
    main()
