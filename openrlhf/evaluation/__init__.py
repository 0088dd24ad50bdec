"""Commands without training: evaluation, batch inference, chat, and the trial of a reward."""
