"""Commands that do not train: evaluation, batch inference, chat and reward test."""
