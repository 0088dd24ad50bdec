"""From files and hub names to rows of token ids: tokenizers, datasets, chat templates, batching."""
