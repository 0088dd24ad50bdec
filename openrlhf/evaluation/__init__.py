"""Non-training commands: evaluation, batch inference, chat and reward test."""
